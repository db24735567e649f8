"""Models of Hugging Face's libraries: ``TransformersModule``, and adapters of peft."""
