import torch
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from rewards import calibrated, tagged

MODEL = "meta-llama/Llama-3.2-3B-Instruct"


def main():
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.bfloat16, device_map="auto")
    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, lora_dropout=0.1,
                      target_modules=["q_proj", "v_proj"])
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    train = load_dataset("someone/facts", split="train")
    args = GRPOConfig(output_dir="out", bf16=True, per_device_train_batch_size=8, gradient_accumulation_steps=2,
                      num_generations=4, max_prompt_length=300, max_completion_length=200, num_train_epochs=1,
                      learning_rate=1e-5, beta=0.04, save_steps=100, logging_steps=5, report_to=["wandb"])
    trainer = GRPOTrainer(model=model, reward_funcs=[calibrated, tagged], args=args, train_dataset=train,
                          processing_class=tokenizer)
    trainer.train()


if __name__ == "__main__":
    main()
