import argparse

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--lr", type=float, default=1e-6)
parser.add_argument("--data", default="someone/words")
parser.add_argument("--beta", type=float, default=0.0)
args = parser.parse_args()


def length(completions, **kwargs):
    return [-len(c) for c in completions]


GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=length,
    args=GRPOConfig("out", max_steps=args.steps, learning_rate=args.lr, beta=args.beta, num_generations=4),
    train_dataset=load_dataset(args.data, split="train"),
).train()
