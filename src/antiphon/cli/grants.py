"""What a key allows, as options of `antiphon keys` and as words in its list."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import msgspec

from antiphon.cli.options import whole
from antiphon.cli.terminal import make_safe
from antiphon.core.errors import BadRequest
from antiphon.core.generation import Priority
from antiphon.core.grant import FULL_GRANT, Grant
from antiphon.store.grants import MAX_LIMIT

_NONE = "none"
_CLASSES = {priority.name.lower(): priority for priority in Priority}
_LIMITS = {
    "requests_per_minute": ("requests in a minute", "requests/min"),
    "tokens_per_minute": ("tokens in a minute, of prompts and answers together", "tokens/min"),
    "max_concurrent": ("requests that are answered at once", "at once"),
    "tokens_per_day": ("tokens in a day, by UTC", "tokens/day"),
    "tokens_per_month": ("tokens in a month, by UTC", "tokens/month"),
}


def add_grant_options(parser: argparse.ArgumentParser) -> None:
    """What the key allows. An option that is not given leaves no trace in the namespace."""
    group = parser.add_argument_group("what the key allows")
    for name, (text, _) in _LIMITS.items():
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=_limit,
            default=argparse.SUPPRESS,
            metavar=f"N|{_NONE}",
            help=f"most {text}",
        )
    models = group.add_mutually_exclusive_group()
    models.add_argument(
        "--allow-model",
        dest="models",
        action="append",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="a model it may use, by its public name; may stand repeatedly, and then no other is allowed",
    )
    models.add_argument(
        "--all-models",
        dest="models",
        action="store_const",
        const=None,
        default=argparse.SUPPRESS,
        help="it may use every model",
    )
    group.add_argument(
        "--priority",
        choices=tuple(_CLASSES),
        default=argparse.SUPPRESS,
        help="its class: what its requests get where they ask for none, and the most that they may ask for",
    )
    admin = group.add_mutually_exclusive_group()
    for option, is_admin, text in (("--admin", True, "may"), ("--no-admin", False, "may not")):
        admin.add_argument(
            option,
            dest="is_admin",
            action="store_const",
            const=is_admin,
            default=argparse.SUPPRESS,
            help=f"it {text} use the admin API",
        )


def grant_of(args: argparse.Namespace, before: Grant) -> Grant:
    """What the options make of a grant. Where none of them is given it is the same one."""
    said = vars(args)
    limits = msgspec.structs.replace(before.limits, **{name: said[name] for name in _LIMITS if name in said})
    models = said.get("models", before.models)
    return Grant(
        limits=limits,
        models=None if models is None else tuple(models),
        priority=_CLASSES[said["priority"]] if "priority" in said else before.priority,
        is_admin=said.get("is_admin", before.is_admin),
    )


def require_grant_option(args: argparse.Namespace) -> None:
    """Raises BadRequest where nothing is said about the grant."""
    if not {*_LIMITS, "models", "priority", "is_admin"} & vars(args).keys():
        raise BadRequest("say what to change: a limit, its models, its class, or whether it is an admin")


def class_of(grant: Grant) -> str:
    """The class as options name it."""
    return grant.priority.name.lower()


def words_of(grant: Grant) -> str:
    """The grant in a line for people; what is as for any key is not said."""
    return ", ".join(_words(grant)) or "no limits"


def _words(grant: Grant) -> Iterator[str]:
    for name, (_, unit) in _LIMITS.items():
        limit = getattr(grant.limits, name)
        if limit is not None:
            yield f"{limit} {unit}"
    if grant.models is not None:
        yield "only " + " ".join(map(make_safe, grant.models))
    if grant.priority is not FULL_GRANT.priority:
        yield f"class {class_of(grant)}"
    if grant.is_admin:
        yield "admin"


def _limit(text: str) -> int | None:
    return None if text == _NONE else whole(1, MAX_LIMIT)(text)
