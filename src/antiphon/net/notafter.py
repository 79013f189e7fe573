"""When a certificate ends, read from its DER: the one field that Python's ssl module shows of peers only.

Reads no more than it must to get there; checks nothing. For certificates that OpenSSL has taken already.
"""

from __future__ import annotations

import datetime
import ssl

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_LONG_FORM = 0x80


class BadCertificate(Exception):
    """What stands there is no certificate that we can read."""


def not_after(pem: str) -> float:
    """Unix time at which the first certificate of a PEM file ends. Raises BadCertificate."""
    begin, end = pem.find(_BEGIN), pem.find(_END)
    if not 0 <= begin < end:
        raise BadCertificate("there is no certificate in the file")
    try:
        certificate = _Reader(ssl.PEM_cert_to_DER_cert(pem[begin : end + len(_END)]))
        fields = certificate.inside(_SEQUENCE).inside(_SEQUENCE)
        if fields.next_tag == _VERSION:
            fields.take()
        for _ in ("serial number", "signature algorithm", "issuer"):
            fields.take()
        validity = fields.inside(_SEQUENCE)
        validity.take()  # its beginning
        return _time(*validity.take())
    except (ValueError, IndexError) as error:
        raise BadCertificate("the certificate cannot be read") from error


class _Reader:
    """Walks over tag, length and value, one after the other. Raises IndexError, ValueError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def next_tag(self) -> int:
        return self._data[self._at]

    def take(self) -> tuple[int, bytes]:
        """The tag and the value of what comes next."""
        tag, length = self._data[self._at], self._data[self._at + 1]
        start = self._at + 2
        if length >= _LONG_FORM:
            start += length - _LONG_FORM
            length = int.from_bytes(self._data[self._at + 2 : start])
        self._at = start + length
        if self._at > len(self._data):
            raise ValueError("a length leads beyond the end")
        return tag, self._data[start : self._at]

    def inside(self, tag: int) -> _Reader:
        """A reader of what is inside the next value, which has this tag."""
        found, value = self.take()
        if found != tag:
            raise ValueError("not the expected tag")
        return _Reader(value)


def _time(tag: int, value: bytes) -> float:
    text = value.decode("ascii")
    if tag == _UTC_TIME:  # of two digits, 50 and above are 19xx
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("not a time")
    time = datetime.datetime.strptime(text, "%Y%m%d%H%M%SZ")
    return time.replace(tzinfo=datetime.UTC).timestamp()
