"""The contracts of phalanx and the training engine. A sub-package imports only those before it; see CONTRIBUTING."""
