"""ZeRO stages 1 to 3 on DeepSpeed's engine, with offload to CPU and NVMe."""
