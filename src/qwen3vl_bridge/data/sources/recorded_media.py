"""The download record of a source's data."""

from __future__ import annotations

from dataclasses import replace

from qwen3vl_bridge.data.media.images import MediaAccess
from qwen3vl_bridge.data.media.url_cache import UrlCache


def recorded(media: MediaAccess, data: str) -> MediaAccess:
    """The same access, limited to what the record says about the data's downloads, if it is to a download folder.

    Args:
        media: the access.
        data: the record's name of the data, independent of its location.

    Raises:
        DataError: a damaged record.
    """
    addresses = media.addresses or UrlCache()
    return replace(media, addresses=addresses.of_data(data)) if isinstance(addresses, UrlCache) else media


def with_downloads(fingerprint: str, media: MediaAccess, place: str) -> str:
    """The fingerprint of data, including the files that could not be downloaded.

    Args:
        fingerprint: of everything else.
        media: as returned by `recorded`.
        place: the data, for messages.

    Raises:
        Unreachable: unknown yet, because a download is not complete.
    """
    addresses = media.addresses
    record = addresses.record if isinstance(addresses, UrlCache) else None
    return fingerprint if record is None else record.mark(fingerprint, place)
