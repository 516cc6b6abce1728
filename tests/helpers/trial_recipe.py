"""A tiny recipe of three modules on statistics of data, whose modules are run in trials."""

RECIPE = """
name = "tiny"
[model.llm.config]
model_type = "llama"
vocab_size = 256
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 6
num_attention_heads = 4
num_key_value_heads = 4
[model.encoders.vision.config]
model_type = "siglip_vision_model"
image_size = 32
patch_size = 8
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
[model.generator.config]
_class_name = "PixArtTransformer2DModel"
num_attention_heads = 2
attention_head_dim = 16
num_layers = 2
patch_size = 4
in_channels = 3
out_channels = 3
cross_attention_dim = 32
sample_size = 8
[parallel]
placement = "disaggregated"
[training]
sequence_length = 256
global_batch_size = 16
microbatch_size = 1
[simulation]
device = "cpu"
gpus = 8
[simulation.images.vision]
patches = 16
tokens = 16
[simulation.generated]
rows = 4
columns = 4
[[simulation.sequences]]
images = [1, 8]
generated = [1, 3]
"""
