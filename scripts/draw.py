"""Plot pipeline schedules, or recorded steps of a run, as one SVG figure.

A schedule is simulated with the durations of the options. The backward pass of a layer takes twice
as long as its forward pass, or the same time if the module is frozen. Several schedules or records
are plotted below each other on the same time axis.

python scripts/draw.py --schedule 1f1b --stages 4 --microbatches 8
python scripts/draw.py --schedule megatron separated --stages 4 --microbatches 8 \\
    --layers vision=8,llm=16 --images 0,3,1,7,0,2,5,1
python scripts/draw.py --schedule megatron_balanced optimus:coarse optimus --images 0,3,1,7,0,2,5,1
python scripts/draw.py --schedule 1f1b separated --units vision=1x3,llm=2x2 --images 0,3,1,7,0,2,5,1
python scripts/draw.py --records outputs/NAME/timeline/step-10.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torchmm.common.errors import PlanError
from torchmm.common.files import replace_atomically
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.disaggregated import ModuleGroupSize
from torchmm.pipelining.schedules.layouts import ModuleLayers
from torchmm.pipelining.schedules.separated import layer_durations
from torchmm.pipelining.view.draw import Panel, timelines_svg
from torchmm.pipelining.view.file_formats import write_chrome_trace, write_order
from torchmm.pipelining.view.records import read_records
from torchmm.pipelining.view.timeline import analyze_timeline, simulate_order
from torchmm.planning.step import order_step, split_modules
from torchmm.recipe.changes import reject_renamed_options
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.schedules import Placement, schedules_for


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        panels = [_read_timeline(path) for path in options.records]
        panels += [_simulate_schedule(name, options) for name in options.schedule]
        if not panels:
            raise ValueError("nothing to plot; use --schedule or --records")
        if options.trace is not None:
            _require_single(panels, "--trace")
            write_chrome_trace(options.trace, panels[0].records, panels[0].layout)
        title = options.title or ", ".join(panel.label for panel in panels)
        svg = timelines_svg(title, panels, options.width)
        replace_atomically(options.out, svg.encode())
    except (ValueError, OSError, PlanError) as error:
        print(error, file=sys.stderr)
        return 2
    for panel in panels:
        timeline = analyze_timeline(panel.records, panel.layout)
        idle = f"bubbles {100 * timeline.bubble_fraction:.1f} %"
        print(f"{panel.label}: {timeline.makespan_ms:.6g} ms, {idle}")
    print(options.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    about, _, examples = (__doc__ or "").partition("\n\npython ")
    parser = argparse.ArgumentParser(
        description=about,
        epilog="examples:\npython " + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--schedule",
        nargs="+",
        default=[],
        metavar="NAME",
        help="schedules as in a recipe, csv:PATH or optimus:coarse",
    )
    add("--records", nargs="+", default=[], type=Path, metavar="FILE", help="timeline/step-N.json")
    add("--stages", type=int, default=4, help="pipeline ranks (default: 4)")
    add(
        "--microbatches",
        type=int,
        help="number of microbatches (default: number of --images, or 8)",
    )
    add(
        "--layers",
        type=_name_value_parser(int, "N"),
        metavar="NAME=N,...",
        help=(
            "layers of each module, the LLM last (default: llm=16, or vision=8,llm=16 with "
            "--images)"
        ),
    )
    add(
        "--images",
        type=_parse_counts,
        metavar="N,N,...",
        help="images of each microbatch (default: none)",
    )
    add(
        "--sub-microbatch-images",
        type=int,
        default=4,
        help="maximum number of images per sub-microbatch (default: 4)",
    )
    add(
        "--layer-ms",
        type=_name_value_parser(float, "MS"),
        default={},
        metavar="NAME=MS,...",
        help=(
            "forward time of a layer: of the LLM per microbatch, of an encoder per image "
            "(default: 1 each)"
        ),
    )
    add(
        "--virtual-stages",
        type=int,
        default=1,
        help="virtual stages or LLM segments per rank (default: 1)",
    )
    add(
        "--encoder-stages",
        type=int,
        default=1,
        help="pipeline ranks of encoders, for optimus (default: 1)",
    )
    add(
        "--units",
        type=_name_value_parser(_parse_unit, "PxR"),
        metavar="NAME=PxR,...",
        help=(
            "disaggregated modules: pipeline ranks x replicas (default: all modules on --stages "
            "ranks)"
        ),
    )
    add("--freeze", type=_parse_names, default=[], metavar="NAME,...", help="frozen modules")
    add(
        "--transfer-ms",
        type=float,
        default=0.0,
        help="time of a transfer between ranks (default: 0)",
    )
    add(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write the compute order of one --schedule to this file",
    )
    add("--trace", type=Path, metavar="FILE", help="write a Chrome trace of one step to this file")
    add("--title", help="title of the figure (default: names of schedules or records)")
    add("--width", type=int, help="width of the figure in pixels")
    add("--out", type=Path, default=Path("schedule.svg"), help="(schedule.svg)")
    reject_renamed_options(parser, "draw")
    return parser


def _parse_unit(text: str) -> ModuleGroupSize:
    """Parse a unit size such as "2x3"."""
    pipeline, _, replicas = text.partition("x")
    return ModuleGroupSize(int(pipeline), int(replicas or 1))


def _name_value_parser(kind: Callable[[str], object], shown: str) -> Callable[[str], dict]:
    """Return a parser of values by name, such as "vision=8,llm=16"."""

    def read(text: str) -> dict:
        pairs = [part.split("=") for part in text.split(",")]
        return {name: kind(value) for name, value in pairs}

    read.__name__ = f"NAME={shown},..."  # argparse shows it in error messages
    return read


def _parse_counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parse_names(text: str) -> list[str]:
    return text.split(",")


def _require_single(options_set: Sequence[object], option: str) -> None:
    if len(options_set) != 1:
        raise ValueError(f"{option} requires one step, but {len(options_set)} are selected")


def _read_timeline(path: Path) -> Panel:
    records, graph = read_records(path)
    return Panel(str(path), records, graph.layout)


def _simulate_schedule(name: str, options: argparse.Namespace) -> Panel:
    """Return the simulated step of a schedule."""
    images = options.images or ()
    microbatches = _microbatches(options)
    modules = _modules(options, sum(images) / microbatches)
    config = _parallel_section(name, options, [module.name for module in modules])
    is_disaggregated = config.placement == "disaggregated"
    layout = split_modules(config, modules, options.units if is_disaggregated else None)
    parts = tuple(-(-count // options.sub_microbatch_images) for count in images)
    graph = StageGraph(layout, microbatches, dict.fromkeys(layout.sub_microbatched, parts))
    layers = layer_durations(graph)

    def duration_ms(action: Action) -> float:
        module = layout.stages[action.stage].module
        duration = layers(action) * options.layer_ms.get(module, 1.0)
        if module in graph.sub_microbatches:
            # Images are distributed evenly: sub-microbatches differ by at most one image.
            base_count, larger = divmod(images[action.microbatch], parts[action.microbatch])
            duration *= base_count + (action.sub_microbatch < larger)
        return duration

    # On shared ranks, the schedule assumes equal layer durations, regardless of the options.
    shared = config.placement == "interleaved"
    graph, order = order_step(graph, config, layers if shared else duration_ms)
    if options.csv is not None:
        _require_single(options.schedule, "--csv")
        write_order(options.csv, order, graph)
    return Panel(name, simulate_order(order, graph, duration_ms, options.transfer_ms), layout)


def _microbatches(options: argparse.Namespace) -> int:
    images, count = options.images or (), options.microbatches
    if count is None:
        count = len(images) or 8
    if count < 1 or (images and len(images) != count):
        raise ValueError(
            f"--microbatches {count}: must be at least 1, and equal to the number of --images"
        )
    if options.sub_microbatch_images < 1:
        raise ValueError(
            f"--sub-microbatch-images {options.sub_microbatch_images}: must be at least 1"
        )
    return count


def _parallel_section(
    name: str, options: argparse.Namespace, modules: Sequence[str]
) -> ParallelConfig:
    """Return the section [parallel] of a schedule name. "optimus" may have ":coarse" or ":fine"."""
    schedule, _, bubbles = name.partition(":")
    colocated = schedule in schedules_for("colocated")
    if colocated and bubbles not in ("", "fine", "coarse"):
        raise ValueError(f'--schedule {name}: use "{schedule}", or "{schedule}:coarse"')
    *encoders, llm = modules
    modules_config = {
        encoder: {"pipeline": options.encoder_stages} for encoder in encoders if colocated
    }
    placement: Placement = "disaggregated" if options.units else "interleaved"
    return ParallelConfig(
        pipeline=options.stages,
        virtual_stages=options.virtual_stages,
        schedule=schedule if colocated else name,
        placement="colocated" if colocated else placement,
        bubble_granularity="coarse" if bubbles == "coarse" else "fine",
        **modules_config,  # type: ignore[arg-type]
        **{llm: {"segments": options.virtual_stages}},  # type: ignore[arg-type]
    )


def _modules(options: argparse.Namespace, mean_images: float) -> list[ModuleLayers]:
    """Return the modules to split into stages, with the costs of an average microbatch."""
    layers = options.layers or ({"vision": 8, "llm": 16} if options.images else {"llm": 16})
    *encoders, llm = layers
    if bool(encoders) != bool(options.images):
        raise ValueError(
            f"--layers {','.join(layers)}: encoders must come before the LLM and require --images"
        )
    unknown = {*options.freeze, *options.layer_ms} - set(layers)
    if unknown:
        raise ValueError(
            f"unknown module {', '.join(sorted(unknown))}; --layers has {', '.join(layers)}"
        )
    modules = []
    for name, count in layers.items():
        trained = name not in options.freeze
        cost = options.layer_ms.get(name, 1.0) * (mean_images if name != llm else 1)
        modules.append(
            ModuleLayers(
                name,
                "llm" if name == llm else "encoder",
                (cost,) * count,
                sub_microbatched=name != llm,
                trainable=(trained,) * count,
                embedding_trainable=trained,
                head_trainable=trained,
            )
        )
    return modules


if __name__ == "__main__":
    sys.exit(main())
