"""The programs beside the trainer: `jaxrl NAME` starts them."""
