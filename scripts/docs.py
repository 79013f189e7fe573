"""Writes the documents that are made from code: `python -m scripts.docs [--check]`.

    docs/config.md      commands and options, from their parsers
    docs/api.md         request fields, from the gateway's schema and the notes in scripts/fields.py
    docs/metrics.md     metrics, from obs/metrics.py and obs/kvmetrics.py
    docs/redis-keys.md  keys in Redis, from kv/keys.py
    docs/break-even.md  bandwidth from which fetching KV pays, from kv/breakeven.py
    docs/benchmarks.md  by the benches themselves, from their stored runs

With --check nothing is written; exit code 1 names the pages that are stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import docs as benchmarks
from bench import report
from prometheus_client import Counter, Gauge, Histogram
from scripts.fields import api_page

from antiphon.cli.main import COMMANDS, load
from antiphon.kv import breakeven, keys
from antiphon.obs.metrics import GatewayMetrics, WorkerMetrics

DOCS = Path(__file__).parent.parent / "docs"
_NOTICE = "Written by `make docs` from {source}; do not edit.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check all pages."""
    parser = argparse.ArgumentParser(prog="python -m scripts.docs", description="Write the generated docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is stale")
    args = parser.parse_args(argv)
    made = pages()
    stale = [name for name, text in made.items() if not _is_current(DOCS / name, text)]
    runs = report.stored()
    if args.check:
        stale += ["benchmarks.md"] if benchmarks.is_stale(runs) else []
        if stale:
            print(f"stale: {', '.join(f'docs/{name}' for name in stale)}; run: make docs", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (DOCS / name).write_text(made[name], "utf-8")
        print(f"wrote docs/{name}")
    benchmarks.write(runs)
    return 0


def pages() -> dict[str, str]:
    """The pages by file name."""
    return {
        "api.md": api_page(),
        "config.md": _config_page(),
        "metrics.md": _metrics_page(),
        "redis-keys.md": _redis_page(),
        "break-even.md": _break_even_page(),
    }


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text("utf-8") == text


def _config_page() -> str:
    parts = [
        "# Commands and options\n",
        _NOTICE.format(source="the parsers in `cli/`"),
        "There is no configuration file: models stand in a catalogue (`models.toml`), everything else is an "
        "option. Exit codes: 0 done, 1 failed, 2 asked for what cannot be done, 130 left with Ctrl-C.\n",
    ]
    for name in COMMANDS:
        parser = load(name).parser()
        actions = actions_of(parser)
        parts += [f"## antiphon {name}\n", f"{parser.description}\n", *([] if actions else _options(parser))]
        for action in actions:
            parts += [f"### {action.prog}\n", f"{action.description}\n", *_options(action)]
    return "\n".join(parts)


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers of a command's actions (`antiphon kv stats`), where it has some."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return list(action.choices.values())
    return []


def _options(parser: argparse.ArgumentParser) -> list[str]:
    rows = map(_option_row, parser._actions[1:])
    table = _table(("option", "value", "default", "meaning"), rows)
    return [*table, "", f"```\n{parser.epilog}\n```\n"]


def _option_row(action: argparse.Action) -> tuple[str, str, str, str]:
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    if action.choices is not None:
        value = "|".join(map(str, action.choices))
    is_silent = action.default in (None, argparse.SUPPRESS) or action.nargs == 0
    default = "" if is_silent else f"`{action.default}`"
    name = f"`{action.option_strings[-1]}`" if action.option_strings else str(value)
    return name, str(value), default, str(action.help)


def _metrics_page() -> str:
    parts = [
        "# Metrics\n",
        _NOTICE.format(source="`obs/metrics.py`"),
        "Both processes answer `GET /metrics` in Prometheus' text form. Histograms add `_bucket`, `_sum` and "
        "`_count`. Names follow vLLM's where it has one.\n",
    ]
    for title, metrics in (("gateway", GatewayMetrics()), ("worker", WorkerMetrics())):
        rows = [_metric_row(metric) for metric in _metrics_in(metrics)]
        parts += [f"## {title}\n", *_table(("name", "kind", "labels", "meaning"), rows), ""]
    return "\n".join(parts)


def _metrics_in(group: object) -> list[Counter | Gauge | Histogram]:
    """All of a group and of the groups in it, in the order of their declaration."""
    found: list[Counter | Gauge | Histogram] = []
    for value in vars(group).values():
        if isinstance(value, Counter | Gauge | Histogram):
            found.append(value)
        elif type(value).__module__.startswith("antiphon.obs."):
            found += _metrics_in(value)
    return found


def _metric_row(metric: Counter | Gauge | Histogram) -> tuple[str, str, str, str]:
    (family,) = metric.describe()
    suffix = "_total" if family.type == "counter" else ""
    labels = ", ".join(f"`{label}`" for label in metric._labelnames)
    return f"`{family.name}{suffix}`", family.type, labels, family.documentation


def _redis_page() -> str:
    parts = [
        "# Keys in Redis\n",
        _NOTICE.format(source="`kv/keys.py`"),
        "Two roles, two servers: `kv` may evict and lose anything, `control` never evicts. In a pattern "
        "`<…>` stands for a part and `[…]` for one that may be absent.\n",
    ]
    for role in keys.Role:
        rows = [
            (key.name, key.type, f"`{key.pattern}`", key.ttl, key.writer, key.readers, key.about)
            for key in keys.PATTERNS
            if key.role is role
        ]
        head = ("key", "type", "pattern", "TTL", "written by", "read by", "what it is")
        acl = ["", "A login that may do what is needed and no more:\n", f"```\n{keys.ACL[role]}\n```", ""]
        parts += [f"## {role.value}\n", *_table(head, rows), *acl]
    return "\n".join(parts)


_PREFIXES = (2048, 8192, 32_768, 131_072)


def _break_even_page() -> str:
    head = (
        "replica",
        "KV bytes a token",
        *(f"{num_tokens // 1024}k: computing takes" for num_tokens in _PREFIXES),
        *(f"{num_tokens // 1024}k: break-even" for num_tokens in _PREFIXES),
    )
    rows = [
        (
            deployment.name,
            f"{deployment.kv_bytes_per_token:,}",
            *(f"{deployment.prefill_s(n):.3g} s" for n in _PREFIXES),
            *(f"{deployment.break_even_bytes_per_s(n) / 1e9:.3g} GB/s" for n in _PREFIXES),
        )
        for deployment in breakeven.DEPLOYMENTS
    ]
    parts = [
        "# Break-even of fetching KV\n",
        _NOTICE.format(source="`kv/breakeven.py`"),
        "A prefix of so many tokens is fetched faster than computed where the store delivers more than the "
        "break-even bandwidth to the replica. On paper: prefill reaches "
        f"{breakeven.SHARE_OF_PEAK:.0%} of the arithmetic peak, attention included; "
        "a round trip and the import are small beside both. [kv-cache.md](kv-cache.md) says what to make of "
        "it.\n",
        *_table(head, rows),
        "",
    ]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


if __name__ == "__main__":
    sys.exit(main())
