"""Media items as records of TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.metrics.image_files import png_size
from ..framework.metrics.media import Histogram, Images, Media, Table, Text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def add_media(writer: SummaryWriter, tag: str, media: Media) -> None:
    """Record a media item under a tag; several images have their number after the tag, and a table is a text."""
    if isinstance(media, Images):
        # The import takes a tenth of a second, so it is made only when TensorBoard is used.
        from tensorboard.compat.proto.summary_pb2 import Summary

        contents = media.contents()
        for number, content in enumerate(contents):
            name = f"{tag}/{number}" if len(contents) > 1 else tag
            width, height = png_size(content)
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
            writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), media.step)
        for number, caption in enumerate(media.captions):
            writer.add_text(f"{tag}/caption" + (f"/{number}" if len(contents) > 1 else ""), caption, media.step)
    elif isinstance(media, Table):
        writer.add_text(tag, _markdown(media), media.step)
    elif isinstance(media, Text):
        writer.add_text(tag, media.text, media.step)
    elif isinstance(media, Histogram):
        # TensorBoard counts the values of a bucket up to its upper limit.
        low, high, count = media.edges[0], media.edges[-1], sum(media.counts)
        counts, limits = list(media.counts), list(media.edges[1:])
        writer.add_histogram_raw(tag, low, high, count, media.total, media.squares, limits, counts, media.step)


def _markdown(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |" for row in lines)
