from datasets import load_dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

base_name, adapter = "Qwen/Qwen2.5-1.5B-Instruct", "out/sft-adapter"
tok = AutoTokenizer.from_pretrained(base_name)
base = AutoModelForCausalLM.from_pretrained(base_name, torch_dtype="auto")
policy = PeftModel.from_pretrained(base, adapter, is_trainable=True)


def polite(completions, **kwargs):
    return [float("please" in c.lower()) for c in completions]


config = GRPOConfig("out/grpo", num_generations=8, per_device_train_batch_size=16, max_completion_length=128,
                    max_steps=60, learning_rate=2e-5, beta=0.05)
GRPOTrainer(policy, polite, config, load_dataset("someone/requests", split="train"), processing_class=tok).train()
