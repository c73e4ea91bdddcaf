// Emulation of a thread block on a CPU, as far as src/onefold/rl/fused/stage.cu needs it. Threads are fibres that run in
// turn, and warp-level operations wait for all 32 lanes. Slow and exact.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SHARED char *shared = emulated::memory.data();

typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;
using std::max;
using std::min;

struct Index {
    int x = 0, y = 0, z = 0;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
struct Slot {  // what the lanes of a warp bring to one thing they do together
    u32 words[32][6];
    int arrived = 0;
};
static std::vector<char> memory;
static int outside;
static std::vector<ucontext_t> fibres;
static std::vector<std::vector<char>> stacks;
static std::vector<char> done;
static std::vector<Slot> slots[2];
static std::vector<int> turn;  // of each thread: how many things it has done with its warp
static ucontext_t scheduler;
static int waiting, generation;
static std::function<void()> body;

inline void yield() {
    const int me = threadIdx.x;
    swapcontext(&fibres[me], &scheduler);
}

inline void sync() {
    const int mine = generation;
    if (++waiting == blockDim.x) waiting = 0, generation++;
    while (generation == mine) yield();
}

// Put six words where the warp can see them, and wait until all lanes have.
inline Slot &together(const u32 (&words)[6]) {
    const int me = threadIdx.x, warp = me / 32, lane = me % 32;
    Slot &slot = slots[turn[me]++ % 2][warp], &next = slots[turn[me] % 2][warp];
    memcpy(slot.words[lane], words, sizeof words);
    if (++slot.arrived == 32) next.arrived = 0;
    while (slot.arrived < 32) yield();
    return slot;
}

inline void start() {
    body();
    done[threadIdx.x] = 1;
    yield();
}

// How often shared memory was read past its end.
template <class Kernel> int launch(Index grid, int threads, int bytes, Kernel kernel) {
    gridDim = grid, blockDim = Index{threads, 1, 1};
    memory.assign(bytes, 0x7f);  // garbage, as on a GPU
    outside = 0;
    stacks.assign(threads, std::vector<char>(1 << 16));
    body = kernel;
    for (int z = 0; z < grid.z; z++)
        for (int y = 0; y < grid.y; y++)
            for (int x = 0; x < grid.x; x++) {
                blockIdx = Index{x, y, z};
                fibres.assign(threads, ucontext_t()), done.assign(threads, 0), turn.assign(threads, 0);
                slots[0].assign(threads / 32, Slot()), slots[1].assign(threads / 32, Slot());
                waiting = 0;
                for (int t = 0; t < threads; t++) {
                    getcontext(&fibres[t]);
                    fibres[t].uc_stack.ss_sp = stacks[t].data(), fibres[t].uc_stack.ss_size = stacks[t].size();
                    fibres[t].uc_link = &scheduler;
                    makecontext(&fibres[t], start, 0);
                }
                for (int left = threads; left > 0;) {
                    left = 0;
                    for (int t = 0; t < threads; t++)
                        if (!done[t]) threadIdx.x = t, swapcontext(&scheduler, &fibres[t]), left += !done[t];
                }
            }
    return outside;
}
}  // namespace emulated

struct Pointer {  // to whatever a kernel takes there
    void *to;
    template <class T> operator T *() const { return (T *)to; }
};

inline void __syncthreads() { emulated::sync(); }
inline float __int_as_float(int bits) { float f; memcpy(&f, &bits, 4); return f; }
inline u32 bits(float f) { u32 b; memcpy(&b, &f, 4); return b; }
inline float low(u32 both) { return __int_as_float(both << 16); }
inline float high(u32 both) { return __int_as_float(both & 0xffff0000u); }
inline u32 rounded(float f) { const u32 b = bits(f); return (b + 0x7fff + (b >> 16 & 1)) >> 16; }
inline u32 pack(float low, float high) { return rounded(low) | rounded(high) << 16; }
inline u32 larger(u32 a, u32 b) {
    return (low(a) < low(b) ? b & 0xffff : a & 0xffff) | (high(a) < high(b) ? b & 0xffff0000u : a & 0xffff0000u);
}
inline u32 greater(u32 a, u32 b) { return (low(a) > low(b) ? 0xffffu : 0) | (high(a) > high(b) ? 0xffff0000u : 0); }
inline u32 same(u32 a, u32 b) { return (low(a) == low(b) ? 0xffffu : 0) | (high(a) == high(b) ? 0xffff0000u : 0); }
inline u32 sum(u32 a, u32 b) { return pack(low(a) + low(b), high(a) + high(b)); }
inline void copy(char *to, const void *from) { memcpy(to, from, 16); }
inline void arrived() {}
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    u32 found = 0;
    for (int i = 0; i < 4; i++) found |= (u32)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return found;
}
inline u32 place(const void *p) { return (u32)((const char *)p - emulated::memory.data()); }

inline u16 half_word(u32 at) {
    u16 h = 0x7fff;
    if (at + 2 > emulated::memory.size()) emulated::outside++;
    else memcpy(&h, emulated::memory.data() + at, 2);
    return h;
}

inline void load4(u32 (&r)[4], u32 at) {
    const emulated::Slot &slot = emulated::together({at, 0, 0, 0, 0, 0});
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        const u32 row = slot.words[8 * i + lane / 4][0] + lane % 4 * 4;
        r[i] = half_word(row) | half_word(row + 2) << 16;
    }
}

inline void load4_turned(u32 (&r)[4], u32 at) {
    const emulated::Slot &slot = emulated::together({at, 0, 0, 0, 0, 0});
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++)
        r[i] = half_word(slot.words[8 * i + lane % 4 * 2][0] + lane / 4 * 2) |
               half_word(slot.words[8 * i + lane % 4 * 2 + 1][0] + lane / 4 * 2) << 16;
}

// A [16, 16] by rows, B [16, 8] by columns: PTX, mma.m16n8k16.
inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const emulated::Slot &slot = emulated::together({a[0], a[1], a[2], a[3], b0, b1});
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const u32 left = slot.words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const u32 right = slot.words[column * 4 + k % 8 / 2][4 + k / 8];
            c[i] += (k % 2 ? high(left) : low(left)) * (k % 2 ? high(right) : low(right));
        }
    }
}
