"""Log-probabilities by plain transformers in float32, JSON in and out.

`hf_logprobs.py MODEL_DIR TEMPERATURE < [[prompt_ids, response_ids], …]`
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    temperature = float(sys.argv[2])
    answers = []
    for prompt, response in json.load(sys.stdin):
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1] / temperature, -1).gather(-1, ids[0, 1:, None])[:, 0]
        answers.append(logprobs[len(prompt) - 1 :].tolist())
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
