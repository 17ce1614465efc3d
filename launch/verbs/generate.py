"""`launch generate`: samples text from a run's newest checkpoint, as it comes."""

import argparse
import os
import sys

from holmesjax import job
from holmesjax.errors import ConfigError
from holmesjax.generate import Sampler, Sampling
from holmesjax.runtime import program_cache


def run(args: argparse.Namespace) -> int:
    if args.max_tokens < 0:
        fix = "use 0 or more"
        raise ConfigError("--max-tokens", "must be 0 or more", found=args.max_tokens, fix=fix)
    try:
        args.prompt.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no UTF-8
        fix = "type it again, in a terminal that is set to UTF-8"
        found = ascii(args.prompt)
        raise ConfigError("--prompt", "must be text", found=found, fix=fix) from None
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
