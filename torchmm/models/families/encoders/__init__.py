"""Vision and audio encoders: sizes, inputs and connectors."""
