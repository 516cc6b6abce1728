from torchmm.models.multimodal import MultimodalModel
def hf_name(model: MultimodalModel, fqn: str) -> str:
    """Name of a parameter in the Hugging Face class its module is saved as."""
    first, _, rest = fqn.partition(".")
    if first == "llm":
        prefixes = model.llm.weights.hf_prefixes
    else:
        name, _, rest = rest.partition(".")
        prefixes = model.encoders[name].weights.hf_prefixes
    for ours, theirs in prefixes:
        if rest.startswith(ours):
            return theirs + rest.removeprefix(ours)
    raise KeyError(fqn)
