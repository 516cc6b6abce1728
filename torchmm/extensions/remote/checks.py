"""Checks of the recipe keys of this extension."""

from __future__ import annotations

from torchmm.extensions.remote.section import StorageConfig
from torchmm.recipe.data_section import (
    DataConfig,
    ProducersConfig,
    is_address,
    is_host_port,
    is_local,
)
from torchmm.recipe.explain import Problem, Problems
from torchmm.recipe.recipe import Recipe


def find_problems(recipe: Recipe, world_size: int | None) -> Problems:
    """Yield problems of `data.producers` and `data.storage`."""
    yield from _check_producers(recipe.data.producers)
    yield from _check_storage(recipe.data)


def _check_storage(data: DataConfig) -> Problems:
    retry_timeout_s = StorageConfig.from_parent(data).retry_timeout_s
    has_addresses = any(is_address(source.path) for source in (*data.sources, *data.validation))
    if has_addresses and retry_timeout_s >= data.timeout_s:
        text = f"must be below data.timeout_s = {data.timeout_s:g}, after which the run fails"
        yield Problem("data.storage.retry_timeout_s", retry_timeout_s, text, ("data.timeout_s",))


def _check_producers(producers: ProducersConfig) -> Problems:
    registry = producers.registry
    if registry is not None and producers.addresses:
        text = "has no effect together with addresses; remove one of the two keys"
        yield Problem("data.producers.registry", registry, text, ("data.producers.addresses",))
    if producers.plan and registry is None and not producers.addresses:
        text = "requires producers; set data.producers.addresses or registry"
        yield Problem("data.producers.plan", True, text, ("data.producers.addresses",))
    if producers.engine == "ray" and registry is None:
        text = "requires data.producers.registry for its actors"
        yield Problem("data.producers.engine", "ray", text, ("data.producers.registry",))
    elif producers.engine == "ray":
        pair = ("tls_certificate", "tls_key")
        missing = [name for name in pair if getattr(producers, name) is None]
        if not is_local(str(registry)):
            for name in missing:
                text = "is required, because the registry is on another host"
                yield Problem(f"data.producers.{name}", None, text, ("data.producers.registry",))
        elif len(missing) == 1:
            other = f"data.producers.{pair[1 - pair.index(missing[0])]}"
            yield Problem(
                f"data.producers.{missing[0]}", None, f"is required with {other}", (other,)
            )
    yield from _check_producer_addresses(producers)


def _check_producer_addresses(producers: ProducersConfig) -> Problems:
    """Yield invalid addresses, and addresses that require a certificate."""
    registry = producers.registry
    named = [(f"addresses[{n}]", each) for n, each in enumerate(producers.addresses)]
    named += [("registry", registry)] if registry is not None else []
    for name, address in named:
        if not is_host_port(address):
            text = (
                "is not a valid address; use HOST:PORT, for example 10.0.0.7:7411 or [fd00::7]:7411"
            )
            yield Problem(f"data.producers.{name}", address, text)
    if producers.ca_certificate is None:
        key = "data.producers.ca_certificate"
        for name, address in named:
            if is_host_port(address) and not is_local(address):
                text = f"is on another host, which requires encryption; set {key}"
                yield Problem(f"data.producers.{name}", address, text, (key,))
