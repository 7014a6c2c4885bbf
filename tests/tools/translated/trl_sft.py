from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    args=SFTConfig(output_dir="sft", max_seq_length=512, per_device_train_batch_size=4, num_train_epochs=2, packing=True),
    train_dataset=load_dataset("someone/chats", split="train"),
    peft_config=LoraConfig(r=16),
)
trainer.train()
