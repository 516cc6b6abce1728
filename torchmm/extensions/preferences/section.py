"""The section `[preference]` of recipes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torchmm.recipe.section import Section


class PreferenceConfig(Section):
    """Preference tuning with `training.loss` = "preference". See docs/guides/preference_tuning.md.

    Names and values are those of `DPOConfig` and `CPOConfig` of TRL.
    """

    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo", "simpo"] = "sigmoid"
    """Loss of a pair. "sigmoid" is DPO. "sigmoid_norm" divides the log-probability of an answer by
    its number of tokens. "ipo" does the same with a squared loss. "simpo" is "sigmoid_norm" without
    a reference model and with the margin `simpo_gamma`."""
    beta: float = Field(default=0.1, gt=0)
    """Factor of the log-probability ratios. Larger values keep the model closer to the reference.
    For "simpo", use 2 to 2.5."""
    simpo_gamma: float = Field(default=0.5, ge=0)
    """Margin of the rewards for "simpo"."""
    reference_free: bool = False
    """Whether to omit the reference model. The reference is the model at the start of training. It
    requires a copy of the trained parameters and one more forward pass per step."""

    @property
    def uses_reference(self) -> bool:
        """True if the loss depends on a reference model."""
        return self.loss_type != "simpo" and not self.reference_free
