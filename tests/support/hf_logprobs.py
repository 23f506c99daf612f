"""Log-probabilities by plain transformers in float32: `hf_logprobs.py MODEL_DIR < [[prompt_ids, response_ids], …]`, JSON in and out."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    answers = []
    for prompt, response in json.load(sys.stdin):
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
        answers.append(logprobs[len(prompt) - 1 :].tolist())
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
