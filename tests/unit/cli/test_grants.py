"""What a key allows, from options and in words."""

from __future__ import annotations

import argparse

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cli import grants, options
from antiphon.core.errors import BadRequest
from antiphon.core.generation import Priority
from antiphon.core.grant import FULL_GRANT, Grant, Limits


def _args(*arguments: str) -> argparse.Namespace:
    parser = options.CommandParser("antiphon test", description="d", epilog="e")
    grants.add_grant_options(parser)
    return parser.parse_args(arguments)


any_grant = st.builds(
    Grant,
    limits=st.builds(Limits, **{name: st.none() | st.integers(1, 99) for name in Limits.__struct_fields__}),
    models=st.none() | st.lists(st.sampled_from("abc"), min_size=1, unique=True).map(tuple),
    priority=st.sampled_from(Priority),
    is_admin=st.booleans(),
)


@given(before=any_grant)
def test_what_is_not_said_stays(before: Grant) -> None:
    """Without an option a grant is the same; and nothing to do is said."""
    assert grants.grant_of(_args(), before) == before
    with pytest.raises(BadRequest, match="say what to change"):
        grants.require_grant_option(_args())


@given(before=any_grant, after=any_grant)
def test_options_make_any_grant_of_any_other(before: Grant, after: Grant) -> None:
    """Every grant can be written down as options, whatever was there before."""
    said = []
    for name in Limits.__struct_fields__:
        limit = getattr(after.limits, name)
        said += ["--" + name.replace("_", "-"), "none" if limit is None else str(limit)]
    models = ["--all-models"] if after.models is None else [f"--allow-model={one}" for one in after.models]
    said += [*models, "--priority", grants.class_of(after), "--admin" if after.is_admin else "--no-admin"]
    args = _args(*said)
    grants.require_grant_option(args)
    assert grants.grant_of(args, before) == after


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_each_limit_has_words(name: str) -> None:
    """A limit that there is shows in the list, with its number."""
    grant = Grant(limits=msgspec.structs.replace(FULL_GRANT.limits, **{name: 123456}))
    assert grants.words_of(grant).startswith("123456 ")


def test_model_names_cannot_paint_the_terminal() -> None:
    """What was stored by other means is shown, not obeyed."""
    assert "\x1b" not in grants.words_of(Grant(models=("\x1b[31m",)))
