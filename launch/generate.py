"""`launch generate`: samples text from a run's newest checkpoint, as it comes."""

import argparse
import sys

from holmesjax.generate import Sampler, Sampling


def run(args: argparse.Namespace) -> int:
    sampling = Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )
    sampler = Sampler.load(args.run_dir, lambda text: print(text, file=sys.stderr))
    sys.stdout.write(args.prompt)
    for text in sampler.stream(args.prompt, args.max_tokens, sampling):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
