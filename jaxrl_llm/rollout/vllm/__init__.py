"""The vLLM engine: servers, requests and weight pushes."""
