"""Leases: what they look like, and what makes one count."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.generation import Load
from antiphon.core.lease import (
    MAX_LEASE_BYTES,
    BadLease,
    Lease,
    LeaseFault,
    LeaseSeal,
    is_worker_id,
    new_worker_id,
)
from support.loopback import SECRET, worker_info

ID = "00112233445566778899aabbccddeeff"
LEASE = Lease(
    id=ID,
    address="http://10.0.0.7:8100",
    protocol=2,
    info=worker_info(),
    load=Load(5, 1, 2, 300, 6, 1, 1, draining=True),
)
SEAL = LeaseSeal(SECRET)


def _fault(worker_id: str, sealed: bytes, seal: LeaseSeal = SEAL) -> LeaseFault:
    with pytest.raises(BadLease) as caught:
        seal.unseal(worker_id, sealed)
    return caught.value.fault


def test_what_was_sealed_comes_back() -> None:
    """Another process with the same secret reads the same lease; a person can read it, too."""
    sealed = SEAL.seal(LEASE)
    assert LeaseSeal(SECRET).unseal(ID, sealed) == LEASE
    assert b'"address":"http://10.0.0.7:8100"' in sealed


def test_ids_are_random_and_fit_for_a_key() -> None:
    """Each life has another one, and nothing else passes for one."""
    ids = {new_worker_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(map(is_worker_id, ids))
    assert not any(map(is_worker_id, ("", ID + "0", ID.upper(), "../" + ID[3:], ID + "\n", "{" + ID[1:])))


def test_lease_under_another_id_is_forged() -> None:
    """One worker's lease copied to another key says nothing about that other worker."""
    assert _fault(new_worker_id(), SEAL.seal(LEASE)) is LeaseFault.FORGED


def test_lease_by_another_secret_is_forged() -> None:
    """Who does not know the workers' secret cannot send a gateway anywhere."""
    sealed = LeaseSeal("not the secret of these tests").seal(LEASE)
    assert _fault(ID, sealed) is LeaseFault.FORGED


@given(st.data())
def test_no_altered_byte_is_believed(data: st.DataObject) -> None:
    """Any change anywhere makes it no lease."""
    sealed = bytearray(SEAL.seal(LEASE))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    assert _fault(ID, bytes(sealed)) in (LeaseFault.FORGED, LeaseFault.MALFORMED)


@given(st.binary(max_size=200))
def test_noise_is_no_lease(noise: bytes) -> None:
    """Whatever lies there, the answer is a fault of the closed set."""
    assert _fault(ID, noise) in (LeaseFault.FORGED, LeaseFault.MALFORMED)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"id":1}', b"[" * 3000, b"\xff"])
def test_sealed_nonsense_is_malformed(body: bytes) -> None:
    """A worker of another version may seal what we cannot read: said, never raised as something else."""
    sealed = b"1 " + SEAL._mac(ID, body) + b" " + body
    assert _fault(ID, sealed) is LeaseFault.MALFORMED


def test_unknown_fields_of_a_later_version_are_passed_over() -> None:
    """While a fleet is renewed, old gateways read new workers' leases."""
    body = msgspec.json.encode(msgspec.to_builtins(LEASE) | {"colour": "blue"})
    assert SEAL.unseal(ID, b"1 " + SEAL._mac(ID, body) + b" " + body) == LEASE


def test_length_is_bounded_on_both_sides() -> None:
    """What would not be read is not written, and what is too long is not looked at."""
    with pytest.raises(ValueError, match="at most"):
        SEAL.seal(msgspec.structs.replace(LEASE, address="http://" + MAX_LEASE_BYTES * "h"))
    assert _fault(ID, SEAL.seal(LEASE) + MAX_LEASE_BYTES * b" ") is LeaseFault.TOO_LONG
