"""Language models as pure functions of their parameters. This package has no RL code."""

import os

# Only the tokenizers of transformers are used. Without this, transformers warns at every start that PyTorch is missing.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
