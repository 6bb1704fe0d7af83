// Kernels for deltas: find changed weights, write new values, hash frames. NVRTC compiles them for
// the GPU (`cuda.rs`). Tests compile them as C++ and run one thread after the other
// (`tests/host.cpp`).
//
// So threads do not communicate: no barriers, no shared memory, no warp functions. A step that needs
// the results of all threads is another kernel. Every parameter has eight bytes. Weights are
// unsigned integers of W bytes. Addresses of weights are multiples of 16.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define THREAD (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x)

constexpr u64 FRAME = 1 << 20;       // weights
constexpr u64 CHUNK = 1024;          // weights that a thread counts and collects
constexpr u64 CHUNK_WORDS = CHUNK / 64;
constexpr u64 RUN = 32;              // numbers that a thread sums: chunks of a group, groups of a frame
constexpr u64 NOWHERE = ~0ull;       // start of a frame that is not collected

template <int W> struct Weight;
template <> struct Weight<1> { typedef u8 type; };
template <> struct Weight<2> { typedef u16 type; };
template <> struct Weight<4> { typedef u32 type; };
template <> struct Weight<8> { typedef u64 type; };

// Eight weights, read 16 bytes at a time (8 if W is 1).
template <int W> struct alignas(W == 1 ? 8 : 16) Eight { u64 words[W]; };

// Bit i of byte `group` of `bits`: weight 8 · group + i differs. Groups beyond the last weight are zero.
template <int W>
__device__ void compare(const u8 *__restrict__ old_bytes, const u8 *__restrict__ new_bytes, u64 weights, u64 groups, u8 *__restrict__ bits)
{
    const u64 group = THREAD;
    if (group >= groups) return;
    u32 differs = 0;
    if (group * 8 + 8 <= weights) {
        const Eight<W> before = reinterpret_cast<const Eight<W> *>(old_bytes)[group];
        const Eight<W> after = reinterpret_cast<const Eight<W> *>(new_bytes)[group];
        for (int word = 0; word < W; word++) {
            u64 other = before.words[word] ^ after.words[word];
            for (int i = 0; i < 8 / W; i++) {
                const bool one = static_cast<typename Weight<W>::type>(other) != 0;
                differs |= static_cast<u32>(one) << (word * (8 / W) + i);
                other >>= 8 * W % 64;
            }
        }
    } else {
        typedef typename Weight<W>::type T;
        const T *before = reinterpret_cast<const T *>(old_bytes), *after = reinterpret_cast<const T *>(new_bytes);
        for (u64 i = group * 8; i < weights; i++) differs |= static_cast<u32>(before[i] != after[i]) << (i % 8);
    }
    bits[group] = static_cast<u8>(differs);
}

// Counts the differing weights of each chunk.
extern "C" __global__ void count(const u64 *__restrict__ bits, u64 chunks, u32 *__restrict__ counts)
{
    const u64 chunk = THREAD;
    if (chunk >= chunks) return;
    u32 differ = 0;
    for (u64 i = 0; i < CHUNK_WORDS; i++) differ += static_cast<u32>(__popcll(bits[chunk * CHUNK_WORDS + i]));
    counts[chunk] = differ;
}

// In runs of 32, replaces each number by the sum of those before it in its run. The run's sum goes to `sums`.
extern "C" __global__ void sum(u32 *__restrict__ numbers, u64 count, u32 *__restrict__ sums)
{
    const u64 run = THREAD;
    if (run * RUN >= count) return;
    const u64 end = (run + 1) * RUN < count ? (run + 1) * RUN : count;
    u32 before = 0;
    for (u64 i = run * RUN; i < end; i++) {
        const u32 number = numbers[i];
        numbers[i] = before;
        before += number;
    }
    sums[run] = before;
}

// Writes index (in its frame) and new value of each differing weight, ascending, from `starts[frame]` on.
template <int W>
__device__ void collect(const u8 *__restrict__ new_bytes, const u64 *__restrict__ bits, const u32 *__restrict__ before_chunk,
                        const u32 *__restrict__ before_group, const u64 *__restrict__ starts, u64 chunks,
                        u32 *__restrict__ indices, u8 *__restrict__ values)
{
    typedef typename Weight<W>::type T;
    const u64 chunk = THREAD;
    if (chunk >= chunks) return;
    const u64 frame = chunk / (FRAME / CHUNK);
    if (starts[frame] == NOWHERE) return;
    u64 at = starts[frame] + before_group[chunk / RUN] + before_chunk[chunk];
    const T *weights = reinterpret_cast<const T *>(new_bytes) + frame * FRAME;
    for (u64 word = 0; word < CHUNK_WORDS; word++) {
        for (u64 left = bits[chunk * CHUNK_WORDS + word]; left != 0; left &= left - 1) {
            const u64 bit = static_cast<u64>(__ffsll(static_cast<long long>(left))) - 1;
            const u64 index = chunk % (FRAME / CHUNK) * CHUNK + word * 64 + bit;
            indices[at] = static_cast<u32>(index);
            reinterpret_cast<T *>(values)[at] = weights[index];
            at++;
        }
    }
}

// Writes values to their indices. A block writes one run: address of its frame, first entry, number of entries.
template <int W> __device__ void put(const u64 *__restrict__ runs, const u32 *__restrict__ indices, const u8 *__restrict__ values)
{
    typedef typename Weight<W>::type T;
    const u64 *run = runs + 3ull * blockIdx.x;
    T *frame = reinterpret_cast<T *>(run[0]);
    for (u64 i = run[1] + threadIdx.x; i < run[1] + run[2]; i += blockDim.x) {
        frame[indices[i]] = reinterpret_cast<const T *>(values)[i];
    }
}

#define FOR_WIDTH(W)                                                                                                            \
    extern "C" __global__ void compare_##W(const u8 *old_bytes, const u8 *new_bytes, u64 weights, u64 groups, u8 *bits)         \
    {                                                                                                                           \
        compare<W>(old_bytes, new_bytes, weights, groups, bits);                                                                \
    }                                                                                                                           \
    extern "C" __global__ void collect_##W(const u8 *new_bytes, const u64 *bits, const u32 *before_chunk,                       \
                                           const u32 *before_group, const u64 *starts, u64 chunks, u32 *indices, u8 *values)    \
    {                                                                                                                           \
        collect<W>(new_bytes, bits, before_chunk, before_group, starts, chunks, indices, values);                               \
    }                                                                                                                           \
    extern "C" __global__ void put_##W(const u64 *runs, const u32 *indices, const u8 *values) { put<W>(runs, indices, values); }

FOR_WIDTH(1)
FOR_WIDTH(2)
FOR_WIDTH(4)
FOR_WIDTH(8)

// XXH3-128 with seed 0 of inputs over 240 bytes (xxHash 0.8, doc/xxhash_spec.md). Its eight
// accumulators are independent until the end, so each has a thread.

constexpr u64 PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
constexpr u64 PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9;
constexpr u64 PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5;
constexpr u64 AVALANCHE = 0x165667919E3779F9;
constexpr int STRIPE = 64;                  // bytes
constexpr int BLOCK_STRIPES = 16;           // then the accumulators are scrambled
constexpr int BLOCK = STRIPE * BLOCK_STRIPES;

__constant__ u8 SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

__constant__ u64 INITIAL[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

// Eight bytes, little-endian, at any address.
__device__ u64 read(const u8 *bytes)
{
    u64 value = 0;
    for (int i = 0; i < 8; i++) value |= static_cast<u64>(bytes[i]) << (8 * i);
    return value;
}

// What a stripe adds to an accumulator that reads `own` and whose neighbor reads `other`.
__device__ u64 stripe(u64 own, u64 other, u64 key)
{
    own ^= key;
    return other + (own & 0xffffffff) * (own >> 32);
}

// The accumulators of each frame. `frames` has address (a multiple of 8) and bytes (over 240). Eight threads per frame.
extern "C" __global__ void hash(const u64 *__restrict__ frames, u64 count, u64 *__restrict__ accumulators)
{
    const u64 frame = THREAD / 8;
    const int index = static_cast<int>(THREAD % 8);
    if (frame >= count) return;
    const u8 *bytes = reinterpret_cast<const u8 *>(frames[2 * frame]);
    const u64 length = frames[2 * frame + 1];
    const u64 *own = reinterpret_cast<const u64 *>(bytes) + index, *other = reinterpret_cast<const u64 *>(bytes) + (index ^ 1);
    u64 keys[BLOCK_STRIPES];
    for (int i = 0; i < BLOCK_STRIPES; i++) keys[i] = read(SECRET + 8 * (i + index));
    const u64 scramble = read(SECRET + 192 - STRIPE + 8 * index);
    u64 value = INITIAL[index];
    const u64 blocks = (length - 1) / BLOCK;
    for (u64 block = 0; block < blocks; block++) {
#pragma unroll
        for (int i = 0; i < BLOCK_STRIPES; i++) value += stripe(own[8 * i], other[8 * i], keys[i]);
        own += BLOCK / 8;
        other += BLOCK / 8;
        value = (value ^ (value >> 47) ^ scramble) * PRIME32_1;
    }
    const int rest = static_cast<int>((length - 1) % BLOCK / STRIPE);
#pragma unroll
    for (int i = 0; i < BLOCK_STRIPES; i++) {
        if (i < rest) value += stripe(own[8 * i], other[8 * i], keys[i]);
    }
    // the last 64 bytes, even if some were read before
    const u8 *last = bytes + length - STRIPE;
    value += stripe(read(last + 8 * index), read(last + 8 * (index ^ 1)), read(SECRET + 192 - STRIPE - 7 + 8 * index));
    accumulators[THREAD] = value;
}

__device__ u64 merge(const u64 *accumulators, const u8 *secret, u64 value)
{
    for (int i = 0; i < 4; i++) {
        const u64 a = accumulators[2 * i] ^ read(secret + 16 * i), b = accumulators[2 * i + 1] ^ read(secret + 16 * i + 8);
        value += (a * b) ^ __umul64hi(a, b);
    }
    value = (value ^ (value >> 37)) * AVALANCHE;
    return value ^ (value >> 32);
}

// Writes low and high half of each frame's digest.
extern "C" __global__ void digest(const u64 *__restrict__ frames, u64 count, const u64 *__restrict__ accumulators, u64 *__restrict__ digests)
{
    const u64 frame = THREAD;
    if (frame >= count) return;
    const u64 length = frames[2 * frame + 1];
    digests[2 * frame] = merge(accumulators + 8 * frame, SECRET + 11, length * PRIME64_1);
    digests[2 * frame + 1] = merge(accumulators + 8 * frame, SECRET + 192 - STRIPE - 11, ~(length * PRIME64_2));
}
