"""Tables of recipes with small models that are simulated with data statistics."""

LLM = """
[model.llm.config]
model_type = "llama"
vocab_size = 512
hidden_size = 256
intermediate_size = 512
num_hidden_layers = 8
num_attention_heads = 4
num_key_value_heads = 2
"""
ENCODER = """
[model.encoders.{name}.config]
model_type = "siglip_vision_model"
image_size = 64
patch_size = 16
hidden_size = 256
intermediate_size = 512
num_hidden_layers = 4
num_attention_heads = 4
[simulation.images.{name}]
patches = 16
tokens = 16
[[simulation.sequences]]
encoder = "{name}"
images = [0, 12]
"""
