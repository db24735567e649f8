"""Non-finite losses and gradients, loss spikes, and collectives that differ between ranks."""
