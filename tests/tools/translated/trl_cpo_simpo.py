import argparse
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import CPOConfig, CPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=8e-7)
parser.add_argument("--data", type=str, required=True)
cli = parser.parse_args()

model_id = "someone/llama-8b-sft"
model = AutoModelForCausalLM.from_pretrained(model_id)
args = CPOConfig(
    output_dir="simpo", loss_type="simpo", cpo_alpha=0.5, beta=2.5, simpo_gamma=1.2, learning_rate=cli.lr,
    per_device_train_batch_size=2, gradient_accumulation_steps=8, max_steps=800, lr_scheduler_type="cosine",
    warmup_ratio=0.1, optim="adamw_torch", gradient_checkpointing=True, label_smoothing=0.0, report_to="none",
)
trainer = CPOTrainer(
    model=model, args=args, train_dataset=load_dataset(cli.data, split="train"),
    processing_class=AutoTokenizer.from_pretrained(model_id),
    peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", use_rslora=True),
)
trainer.train()
