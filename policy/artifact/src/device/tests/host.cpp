// The kernels as C++, with the parts of CUDA that they use, for one thread at a time. Tests build it (`host.rs`).

struct Place {
    unsigned int x;
};

static thread_local Place blockIdx, threadIdx, blockDim;

#define __global__
#define __device__ static
#define __constant__ static const

static inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
static inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }

__extension__ typedef unsigned __int128 Wide;
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return static_cast<unsigned long long>((static_cast<Wide>(a) * b) >> 64);
}

#include "kernels.cu"

// Sets the thread that runs next.
extern "C" void place(unsigned int block, unsigned int thread, unsigned int threads)
{
    blockIdx.x = block;
    threadIdx.x = thread;
    blockDim.x = threads;
}
