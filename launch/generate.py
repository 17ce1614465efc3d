"""`launch generate`: samples text from a run's newest checkpoint, as it comes."""

import argparse
import os
import sys

from holmesjax import job, program_cache
from holmesjax.generate import Sampler, Sampling


def run(args: argparse.Namespace) -> int:
    sampling = Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )
    warn = lambda text: print(text, file=sys.stderr)
    run_config = job.load_config(args.run_dir).run
    program_cache.use(run_config.compilation_cache, os.environ, warn)
    sampler = Sampler.load(args.run_dir, warn)
    sys.stdout.write(args.prompt)
    for text in sampler.stream(args.prompt, args.max_tokens, sampling):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
