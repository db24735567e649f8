"""Models of Hugging Face's libraries: ``TransformersModule``, adapters of peft, 4-bit bases, sampling by rows."""
