"""A stand-in for the HIP runtime library, so that FlyDSL's own launchers run where there is no GPU.

    stub = load(folder)                     # before anything loads libamdhip64.so.7
    stub.on_launch = lambda launch: ...     # or count, or run the code object in the simulator

The library answers "fine" to everything. Loading a module keeps its image; launching a kernel calls back with the
image, the kernel's name, grid, block and the addresses of its arguments. Without a callback a launch costs almost
nothing, which leaves the host cost of the launcher to be measured. Built with the C compiler of the machine.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HipStub", "StubLaunch", "compiler", "load"]

_SOURCE = r"""
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
typedef void (*callback)(const void *image, const char *name, const unsigned *shape, void *stream, void **args);
struct module { const void *image; };
struct function { const void *image; char name[256]; };
static callback on_launch;
static unsigned long launches;
void stub_on_launch(callback f) { on_launch = f; }
unsigned long stub_launches(void) { return launches; }
int hipModuleLoadData(struct module **m, const void *image) {
  *m = malloc(sizeof **m); (*m)->image = image; return 0;
}
int hipModuleGetFunction(struct function **f, struct module *m, const char *name) {
  *f = malloc(sizeof **f); (*f)->image = m->image; strncpy((*f)->name, name, 255); (*f)->name[255] = 0; return 0;
}
int hipModuleLaunchKernel(struct function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned lds, void *stream, void **args, void **extra) {
  unsigned shape[7] = {gx, gy, gz, bx, by, bz, lds};
  launches++;
  if (on_launch) on_launch(f->image, f->name, shape, stream, args);
  return 0;
}
int hipGetDevice(int *d) { *d = 0; return 0; }
int hipGetDeviceCount(int *n) { *n = 1; return 0; }
const char *hipGetErrorName(int e) { return "hipSuccess"; }
int hipGetLastError(void) { return 0; }
int hipMalloc(void **p, size_t n) { *p = malloc(n); return 0; }
int hipFree(void *p) { free(p); return 0; }
int hipMemcpy(void *d, const void *s, size_t n, int k) { memcpy(d, s, n); return 0; }
int hipMemset(void *d, int v, size_t n) { memset(d, v, n); return 0; }
#define FINE(name) int name(void) { return 0; }
FINE(hipDeviceSynchronize) FINE(hipEventCreateWithFlags) FINE(hipEventDestroy) FINE(hipEventRecord)
FINE(hipEventSynchronize) FINE(hipHostGetDevicePointer) FINE(hipHostRegister) FINE(hipHostUnregister)
FINE(hipMemcpyAsync) FINE(hipMemsetD16Async) FINE(hipMemsetD32Async) FINE(hipModuleUnload) FINE(hipSetDevice)
FINE(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor) FINE(hipStreamCreate) FINE(hipStreamDestroy)
FINE(hipStreamSynchronize) FINE(hipStreamWaitEvent)
"""

_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip


@dataclass
class StubLaunch:
    """One launch. image: address of the code object. arguments: address of each argument's value."""

    image: int
    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    stream: int
    arguments: ctypes._Pointer[ctypes.c_void_p]

    def argument(self, index: int, size: int) -> bytes:
        """The bytes of argument ``index``."""
        address = self.arguments[index]
        assert address is not None
        return ctypes.string_at(address, size)

    def code_object(self) -> bytes:
        """The ELF that the module was loaded from; its length is where its section headers end."""
        header = ctypes.string_at(self.image, 64)
        assert header[:4] == b"\x7fELF", "the image is no bare code object"
        sections, size, count = (
            int.from_bytes(header[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62))
        )
        return ctypes.string_at(self.image, sections + size * count)


class HipStub:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.stub_launches.restype = ctypes.c_ulong
        self._keep: object = None

    @property
    def launches(self) -> int:
        """Launches so far."""
        return int(self._library.stub_launches())

    def on_launch(self, function: Callable[[StubLaunch], None] | None) -> None:
        """Call ``function`` at every launch from now on; None: nothing."""
        if function is None:
            self._keep = _CALLBACK()
        else:

            def call(image: int, name: bytes, shape: object, stream: int, args: object) -> None:
                s = [shape[i] for i in range(6)]  # type: ignore[index]
                function(StubLaunch(image, name.decode(), tuple(s[:3]), tuple(s[3:]), stream or 0, args))  # type: ignore[arg-type]

            self._keep = _CALLBACK(call)
        self._library.stub_on_launch(self._keep)


def compiler() -> str | None:
    """A C compiler, or None."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def load(folder: Path) -> HipStub:
    """Build the library in ``folder`` and load it under the name that FlyDSL's runtime asks for."""
    cc = compiler()
    if cc is None:
        raise RuntimeError("no C compiler")
    source, versions, library = folder / "stub.c", folder / "stub.map", folder / "libamdhip64.so.7"
    source.write_text(_SOURCE)
    versions.write_text("hip_4.2 { global: *; };\n")
    subprocess.run(
        [cc, "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{library.name}", f"-Wl,--version-script={versions}",
         "-o", str(library), str(source)],
        check=True,
    )  # fmt: skip
    return HipStub(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
