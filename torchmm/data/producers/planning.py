"""Steps planned by producers, for trainers that have neither the data nor their index.

With `data.producers.plan` a producer answers three more questions, as JSON:

    describe   which data it has: what decides order and content of samples, names of sources
    plan       packs of the step after a state (`torchmm.data.steps.elsewhere`)
    pictures, references   a sample's images, as PNG files, and texts, to be shown

All ranks ask the same producer, which plans a step once; if it is gone, any other goes on from the
state that it is sent. What a trainer can know itself, its recipe's settings, it compares.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple, TypeVar

from PIL import Image
from pyarrow import flight

from torchmm.common.batch import ImageMeta, SampleMeta
from torchmm.common.errors import CheckpointError, DataError, TorchmmError
from torchmm.common.generated import GeneratedMeta
from torchmm.data.items import Item, PackItems
from torchmm.data.media.images import decode_rgb
from torchmm.data.producers.ask import Asking, OtherDataError
from torchmm.data.sources.open import Samples
from torchmm.data.steps.elsewhere import Asked, StepPart, UnknownStateError
from torchmm.recipe.data_section import DataConfig, ProducersConfig
from torchmm.recipe.training_section import TrainingConfig

ERRORS: dict[str, type[TorchmmError]] = {"checkpoint": CheckpointError, "data": DataError}
UNKNOWN = {"unknown": True}
END = {"end": True}

T = TypeVar("T")


class Described(NamedTuple):
    """What a producer says of its data.

    Attributes:
        listed: fingerprint by which a registry knows it.
        fingerprint: of these samples, which are others if they are held out.
        names: of the sources, in order.
        identity: see `torchmm.data.identity`.
        digest: see `Samples.digest`.
        global_batch_size: packs of the steps that it plans.
    """

    listed: str
    fingerprint: str
    names: list[str]
    identity: dict[str, Any]
    digest: tuple[str, str]
    global_batch_size: int


class Plans:
    """The producer's side; may be called by several threads.

    Args:
        data, training: of the recipe.
        samples: to train on.
        held_out: None: there are none.
    """

    def __init__(
        self, data: DataConfig, training: TrainingConfig, samples: Samples, held_out: Samples | None
    ) -> None:
        self._training = training
        self._samples = {False: samples} | ({True: held_out} if held_out else {})
        self._steps = {kind: each.shared(data, training) for kind, each in self._samples.items()}

    def answer(self, kind: str, body: bytes) -> bytes:
        """What is sent back; raises ValueError if that was no question."""
        try:
            asked = json.loads(body)
            held_out = asked["held_out"]
            if held_out not in self._samples:
                raise ValueError("there are no held-out samples in its recipe")
            if kind == "describe":
                return json.dumps(self._describe(held_out)._asdict()).encode()
            if kind == "plan":
                return json.dumps(self._plan(held_out, asked)).encode()
            if kind in ("pictures", "references"):
                return json.dumps(self._shown(kind, held_out, asked)).encode()
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not a question ({type(error).__name__}: {error})") from error
        raise ValueError(f"cannot {kind[:20]!r}")

    def _describe(self, held_out: bool) -> Described:
        samples = self._samples[held_out]
        return Described(
            self._samples[False].fingerprint(),
            samples.fingerprint(),
            list(samples.feeds()),
            samples.identity,
            samples.digest(),
            self._training.global_batch_size,
        )

    def _plan(self, held_out: bool, values: Mapping[str, Any]) -> dict[str, Any]:
        asked = Asked(**{key: values[key] for key in Asked._fields})
        count = self._training.global_batch_size
        if asked.packs is not None and not set(asked.packs) <= set(range(count)):
            raise ValueError(f"a step has {count} packs")
        try:
            part = self._steps[held_out].part(asked)
        except UnknownStateError:
            return UNKNOWN
        except (CheckpointError, DataError) as error:
            kind = next(kind for kind, each in ERRORS.items() if isinstance(error, each))
            return {"error": [kind, str(error)]}
        if part is None:
            return END
        packed = [(number, list(map(_packed, pack))) for number, pack in part.packs.items()]
        return part._asdict() | {"packs": packed}

    def _shown(self, kind: str, held_out: bool, asked: Mapping[str, Any]) -> list[str]:
        feed = int(asked["feed"])
        index = int(asked["index"])
        source = self._samples[held_out].sources[feed : feed + 1]
        if feed < 0 or not source or source[0].index is None or not source[0].index.has(index):
            raise ValueError(f"there is no sample {index} of source {feed}")
        decoder = self._samples[held_out].decoder
        if kind == "references":
            return list(decoder.references(feed, index))
        return [_png(image) for image in decoder.images(feed, index)]


def _png(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


class ProducersPlans:
    """The trainer's side.

    Args:
        config: the producers.
        held_out: ask for held-out samples.
        differences: what is other in a producer's data than this run says.

    Raises:
        ConfigError: a certificate cannot be read.
        DataError: no producer answers, or none has these data.
    """

    def __init__(
        self,
        config: ProducersConfig,
        held_out: bool,
        differences: Callable[[Described], list[str]],
    ) -> None:
        self._held_out = held_out
        find = partial(self._find, differences)
        self.described = Asking(config, None).ask(0, find)
        self._asking = Asking(config, self.described.listed)

    def part(self, asked: Asked) -> StepPart | None:
        """Of a step; see `SharedSteps.part`."""
        found = self._ask("plan", asked._asdict(), partial(_read_part, self.described.names))
        if isinstance(found, Exception):
            raise found
        return found

    def pictures(self, feed: int, index: int) -> list[Image.Image]:
        """Images of a sample, to be shown."""
        files = self._ask("pictures", {"feed": feed, "index": index}, _read_files)
        return [decode_rgb(file, max_pixels=1 << 28) for file in files]

    def references(self, feed: int, index: int) -> tuple[str, ...]:
        """Texts of a sample, to be compared with."""
        return self._ask("references", {"feed": feed, "index": index}, _read_texts)

    def _ask(self, kind: str, values: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        body = json.dumps(dict(values) | {"held_out": self._held_out}).encode()
        return self._asking.ask(0, partial(_call, kind, body, read))

    def _find(
        self,
        differences: Callable[[Described], list[str]],
        client: flight.FlightClient,
        options: flight.FlightCallOptions,
    ) -> Described:
        body = json.dumps({"held_out": self._held_out}).encode()
        found = _call("describe", body, _read_description, client, options)
        if other := differences(found):
            raise OtherDataError(
                f"it prepares other data than this run: {'; '.join(other)}; start it with "
                "outputs/NAME/recipe.toml of the run"
            )
        return found


def _call(
    kind: str,
    body: bytes,
    read: Callable[[Any], T],
    client: flight.FlightClient,
    options: flight.FlightCallOptions,
) -> T:
    """An answer, read; raises ValueError if it is none."""
    results = list(client.do_action(flight.Action(kind, body), options))
    if len(results) != 1:
        raise ValueError(f"{len(results)} answers")
    try:
        return read(json.loads(results[0].body.to_pybytes()))
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read_description(values: Mapping[str, Any]) -> Described:
    found = Described(**values)
    if not all(isinstance(name, str) for name in found.names):
        raise ValueError("names of sources")
    return found._replace(digest=(str(found.digest[0]), str(found.digest[1])))


def _read_part(names: list[str], values: Mapping[str, Any]) -> StepPart | Exception | None:
    if values == END:
        return None
    if values == UNKNOWN:
        return UnknownStateError()
    if "error" in values:
        kind, text = values["error"]
        return ERRORS[kind](str(text))
    packs: dict[int, PackItems] = {
        int(number): list(starmap(partial(_unpacked, names), pack))
        for number, pack in values["packs"]
    }
    state = dict(values["state"])
    skipped = list(map(str, values["skipped"]))
    return StepPart(packs, skipped, state, float(values["epoch"]), str(values["notice"]))


def _read_texts(values: list[str]) -> tuple[str, ...]:
    return tuple(map(str, values))


def _read_files(values: list[str]) -> list[bytes]:
    return [base64.b64decode(each, validate=True) for each in values]


def _packed(item: Item) -> list[Any]:
    """A sample as JSON."""
    meta = item.meta
    images = [
        [i.width_px, i.height_px, i.patches, i.tokens, i.frames, i.encoder, i.duration_ms,
         i.frame_pixels]
        for i in meta.images
    ]  # fmt: skip
    drawn = [[list(each.grid_thw), each.context] for each in meta.generated]
    return [item.feed, item.epoch, meta.index, meta.tokens, images, meta.encoder, drawn]


def _unpacked(
    names: list[str],
    feed: int,
    epoch: int,
    index: int,
    tokens: int,
    images: list[list[Any]],
    encoder: str | None,
    drawn: list[list[Any]],
) -> Item:
    generated = tuple(GeneratedMeta((t, h, w), context) for (t, h, w), context in drawn)
    own = tuple(ImageMeta(*image) for image in images)
    return Item(feed, epoch, SampleMeta(names[feed], index, tokens, own, encoder, generated))
