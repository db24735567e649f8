"""The training loop, the evaluation loop, and one optimizer step."""
