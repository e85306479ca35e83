"""Score right and wrong digits for held-out images with an exported reranker, and print the area under the ROC curve.

    python examples/digits/rerank.py --hf-model EXPORTED --data out/digits/data

The model runs in transformers. A score is the probability of "yes" against "no", as in Qwen3-VL-Reranker's script.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from transformers import AutoModelForImageTextToText, AutoProcessor

RULE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
TASK = "Given a search query, retrieve relevant candidates that answer the query."


def main() -> None:
    """Print the area under the ROC curve over all documents of the validation records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-model", required=True, help="folder of the exported reranker")
    parser.add_argument("--data", type=Path, required=True, help="folder of the digits, with retrieval/valid.jsonl")
    parser.add_argument("--records", type=int, help="number of records (default: all)")
    options = parser.parse_args()
    processor = AutoProcessor.from_pretrained(options.hf_model)
    model = AutoModelForImageTextToText.from_pretrained(options.hf_model).eval()
    labels, scores = [], []
    lines = (options.data / "retrieval" / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines[: options.records]:
        record = json.loads(line)
        image = Image.open(options.data / record["query"]["image"])
        for document in (record["positive"], *record["negatives"]):
            labels.append(document == record["positive"])
            scores.append(score(model, processor, image, record["query"]["text"], document))
    print(f"AUC {roc_auc_score(labels, scores):.4f} of {len(scores)} documents")


@torch.no_grad()
def score(model: torch.nn.Module, processor: object, image: Image.Image, query: str, document: str) -> float:
    """Return the probability that a document answers a question about an image."""
    texts = (f"<Instruct>: {TASK}", "<Query>:", query, "\n<Document>:", document)
    content = [{"type": "text", "text": text} for text in texts]
    content.insert(2, {"type": "image"})
    messages = [
        {"role": "system", "content": [{"type": "text", "text": RULE}]},
        {"role": "user", "content": content},
    ]
    prompt = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[image], return_tensors="pt")
    yes, no = (processor.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
    logits = model(**inputs).logits[0, -1]
    return torch.sigmoid(logits[yes] - logits[no]).item()


if __name__ == "__main__":
    main()
