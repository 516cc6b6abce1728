"""The recipe's `[data.producers]`: other processes or machines that prepare its samples."""

from __future__ import annotations

from pydantic import Field

from torchmm.recipe.model_section import Section


class ProducersConfig(Section):
    """Processes started with `python -m torchmm.data.serve` that decode, resize, tokenise and pack
    for this run. They share no state with it: any of them can prepare any step."""

    addresses: list[str] = Field(default=[])
    """HOST:PORT of each; empty: samples are prepared on the machine that trains. A step is asked
    of one after the other until one answers."""
    ca_certificate: str | None = None
    """PEM file with the certificate that signed theirs; without it nothing is encrypted, which
    producers only accept on their own machine. Their token stands in the environment variable
    TORCHMM_DATA_TOKEN, never in a recipe."""
    timeout_s: float = Field(default=60.0, gt=0)
    """A producer that has not prepared a step in this time is given up and the next one asked."""
    give_up_s: float = Field(default=180.0, gt=0)
    """The run ends (exit code 3) when no producer has answered for this long."""
    max_message_mb: float = Field(default=1000.0, gt=0)
    """Largest prepared step that is accepted, in units of 10^6 bytes."""
