"""What a source's data were when what they refer to was downloaded.

What lives here: the record of a source's downloads in its access to media, and in its fingerprint. What may not: what a
record is (`data/media/download_record.py`), what a name of data is, which each source knows.
"""

from __future__ import annotations

from dataclasses import replace

from qwen3vl_bridge.data.media.images import MediaAccess
from qwen3vl_bridge.data.media.url_cache import UrlCache


def recorded(media: MediaAccess, data: str) -> MediaAccess:
    """The same access, by what is on record of the data's downloads, where it is to a folder of downloads.

    Args:
        media: it.
        data: what the record calls the data: the same wherever they lie.

    Raises:
        DataError: a damaged record.
    """
    addresses = media.addresses or UrlCache()
    return replace(media, addresses=addresses.of_data(data)) if isinstance(addresses, UrlCache) else media


def with_downloads(fingerprint: str, media: MediaAccess, place: str) -> str:
    """The fingerprint of data, with what could not be downloaded of them.

    Args:
        fingerprint: of all else.
        media: as `recorded` gives it.
        place: what messages call the data.

    Raises:
        Unreachable: it is not known yet, because a download did not come to its end.
    """
    addresses = media.addresses
    record = addresses.record if isinstance(addresses, UrlCache) else None
    return fingerprint if record is None else record.mark(fingerprint, place)
