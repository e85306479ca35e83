"""Receipts drawn on the spot, in the published format of `naver-clova-ix/cord-v2`."""

import io
import json
import random
from pathlib import Path

import datasets
from PIL import Image, ImageDraw

_FOODS = ("Tea", "Rice", "Soup", "Cake")


def receipt(number: int) -> dict[str, bytes | str]:
    """A picture's file, and what it says as "ground_truth": a string of JSON with the keys of the published ones."""
    draw = random.Random(number)
    lines = [(draw.choice(_FOODS), str(draw.randint(1, 9))) for _ in range(2)]
    menu = [{"nm": name, "price": price} for name, price in lines]
    total = str(sum(int(price) for _, price in lines))
    page = Image.new("RGB", (64, 64), "white")
    words = "\n".join([*(f"{name} {price}" for name, price in lines), f"Sum {total}"])
    ImageDraw.Draw(page).multiline_text((2, 2), words, fill="black")
    file = io.BytesIO()
    page.save(file, "PNG")
    truth = {
        "gt_parse": {"menu": menu, "total": {"total_price": total}}, "meta": {"image_id": number}, "valid_line": [],
    }  # fmt: skip
    return {"image": file.getvalue(), "ground_truth": json.dumps(truth)}


def receipts(count: int) -> datasets.Dataset:
    """A data set with the columns and types of the published one."""
    rows = [receipt(number) for number in range(count)]
    columns = {
        "image": [{"bytes": row["image"], "path": None} for row in rows],
        "ground_truth": [row["ground_truth"] for row in rows],
    }
    features = datasets.Features({"image": datasets.Image(), "ground_truth": datasets.Value("string")})
    return datasets.Dataset.from_dict(columns, features=features)


def write_receipts(folder: Path, train: int, valid: int) -> Path:
    """A folder with both splits as Parquet; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    receipts(train).to_parquet(folder / "train.parquet")
    receipts(valid).to_parquet(folder / "validation.parquet")
    return folder
