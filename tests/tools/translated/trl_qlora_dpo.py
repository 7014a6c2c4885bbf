import os
import torch
from datasets import load_dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer

os.environ["WANDB_PROJECT"] = "pairs"
base_model = "someone/qwen-sft"
bnb_config = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True
)
model = AutoModelForCausalLM.from_pretrained(base_model, quantization_config=bnb_config, device_map={"": 0})
model.config.use_cache = False
model = prepare_model_for_kbit_training(model)
tokenizer = AutoTokenizer.from_pretrained(base_model)

peft_config = LoraConfig(
    r=16, lora_alpha=32, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM",
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
)
dataset = load_dataset("someone/pairs")
training_args = DPOConfig(
    output_dir="./dpo", beta=0.2, max_length=1536, max_prompt_length=768, per_device_train_batch_size=2,
    gradient_accumulation_steps=8, learning_rate=5e-6, lr_scheduler_type="cosine", warmup_ratio=0.1,
    num_train_epochs=1, optim="paged_adamw_32bit", eval_strategy="steps", eval_steps=50, save_steps=50,
    gradient_checkpointing=True, bf16=True, report_to="wandb", seed=3,
)
trainer = DPOTrainer(
    model=model, ref_model=None, args=training_args, train_dataset=dataset["train"], eval_dataset=dataset["test"],
    tokenizer=tokenizer, peft_config=peft_config,
)
trainer.train()
trainer.model.save_pretrained("dpo/final")
