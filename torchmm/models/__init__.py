"""Models: layered modality modules cut out of Hugging Face classes, and their checkpoint files."""
