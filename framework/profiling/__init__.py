"""The speed of a fit, and where its time goes."""
