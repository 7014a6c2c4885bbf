"""vLLM as an engine: servers, requests, and weights on their way to them."""
