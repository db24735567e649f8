"""The live state of one fit, validation, test or prediction."""
