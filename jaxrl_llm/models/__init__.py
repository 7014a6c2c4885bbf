"""Language models as pure functions of their parameters; nothing here knows of RL."""

import os

# transformers, used here for its tokenizers alone, would say at every start that PyTorch is missing.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
