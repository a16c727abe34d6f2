"""`logitless align` whose ranks divide the model by FSDP2, as accelerate's launcher has them do on GPUs alone.

torchrun --nproc-per-node 2 -m tests.support.workbench.divided align ...
"""

import sys

from accelerate import DistributedType
from accelerate.state import AcceleratorState
from transformers import Trainer

from logitless.cli.main import main
from logitless.workbench.sft.sharded import fsdp2_plugin


def divide() -> None:
    """Has accelerate believe its launcher, also where it asks its environment anew."""
    plugins = []
    begin, accelerate = AcceleratorState.__init__, Trainer.create_accelerator_and_postprocess

    def begun(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if plugins:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugins[0]

    def accelerated(self):
        accelerate(self)
        plugins.append(fsdp2_plugin(self.model))
        begun(self.accelerator.state)
        self.is_fsdp_enabled = True

    AcceleratorState.__init__, Trainer.create_accelerator_and_postprocess = begun, accelerated


if __name__ == "__main__":
    divide()
    raise SystemExit(main(sys.argv[1:]))
