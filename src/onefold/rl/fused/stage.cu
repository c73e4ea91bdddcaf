// One stage of IMPALA (convolution, max-pool, two residual units), forward and backward, with the images of a block in
// shared memory. Compiled once for each shape of a stage, which these macros describe (see `StageShape` in stages.py):
//
//   CIN, COUT    input and output channels, multiples of 8 and of 16
//   SIDE         side of the input in pixels
//   IMAGES       images per block of the forward kernels and of `units_backward`
//   ROWS         rows of the pooled image that `entry_forward` computes at a time
//   ENTRY_STRIP  rows that `entry_weight_gradient` processes at a time: an even number, or all
//   ENTRY_WARPS, UNITS_WARPS, ENTRY_BACKWARD_WARPS  warps that share the pixels of a convolution
//
// Tensors are [sets, n, side, side, channels] in bfloat16, with one set of weights for each of `sets` networks. Weights
// are [outputs, 9 · inputs], taps before inputs. stages.py launches the kernels and describes what they compute.

#ifndef EMULATED
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
#define SHARED extern __shared__ __align__(16) char shared[];

__device__ __forceinline__ u32 place(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void load4(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

__device__ __forceinline__ void load4_turned(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Pairs of numbers: maxima, sums, and masks with all bits of a half set where one is greater, or where both are equal.
#define PAIRWISE(name, instruction)                                                    \
    __device__ __forceinline__ u32 name(u32 one, u32 other) {                          \
        u32 result;                                                                     \
        asm(instruction " %0, %1, %2;" : "=r"(result) : "r"(one), "r"(other));          \
        return result;                                                                  \
    }
PAIRWISE(larger, "max.NaN.bf16x2")
PAIRWISE(sum, "add.rn.bf16x2")
PAIRWISE(greater, "set.gt.u32.bf16x2")
PAIRWISE(same, "set.eq.u32.bf16x2")

// Copy 16 bytes from global to shared memory asynchronously; `arrived` waits for all copies of this thread.
__device__ __forceinline__ void copy(char *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }
#endif

__device__ __forceinline__ u32 positive(u32 both) { return larger(both, 0); }

// The gradient `both` behind a ReLU whose output was `mask`; and the low bytes of both halves, side by side.
__device__ __forceinline__ u32 let(u32 mask, u32 both) { return greater(mask, 0) & both; }
__device__ __forceinline__ u32 bytes(u32 both) { return both & 255 | both >> 8 & 0xff00; }

constexpr int POOLED = (SIDE + 1) / 2, ACROSS = COUT > 32 ? COUT / 32 : 1, BACK_ACROSS = CIN > 32 ? CIN / 32 : 1;
constexpr int SLICE = COUT < 32 ? COUT : 32;  // outputs that a block of `weight_gradient` has
constexpr int FLAT = (9 * CIN + 15) / 16 * 16;  // a row of the entry's weights

struct Four {
    u32 x, y, z, w;
};

// Images of S × S pixels with zeros around them. The stride of a pixel is an odd multiple of 16 bytes, so that eight
// adjacent pixels lie in different banks. The gap between rows is a multiple of 128 bytes, so that the same holds for
// eight pixels around a corner. The gap is the padding to the right of one row and to the left of the next.
template <int S, int C> struct Plane {
    static constexpr int pitch = C == 8 ? 16 : 2 * C + 16, gap = (pitch + 127) / 128 * 128, row = S * pitch + gap;
    static constexpr int bytes = gap + (S + 2) * row;
    static __device__ __forceinline__ int at(int y, int x) { return gap + (y + 1) * row + x * pitch; }
    static __device__ __forceinline__ int tap(int k) { return (k / 3 - 1) * row + (k % 3 - 1) * pitch; }

    // Offsets of pixel p, and of the i-th 16 bytes, counted over consecutive images.
    static __device__ __forceinline__ int pixel(int p) {
        return p / (S * S) * bytes + at(p % (S * S) / S, p % S);
    }
    static __device__ __forceinline__ int part(int i) { return pixel(i / (C / 8)) + i % (C / 8) * 16; }
};

__device__ __forceinline__ void fill_zeros(char *memory, int bytes) {
    for (int i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) *(Four *)(memory + i) = Four{0, 0, 0, 0};
}

// Copy a matrix [rows, flat] to shared memory, asynchronously.
__device__ __forceinline__ void fetch_weights(char *memory, const u16 *weights, int rows, int flat) {
    const int parts = flat / 8;
    for (int i = threadIdx.x; i < rows * parts; i += blockDim.x)
        copy(memory + i / parts * (2 * flat + 16) + i % parts * 16, weights + 8 * i);
}

// Copy images `first`, `first` + 1, … of [n, S, S, C] to planes of zeros; planes beyond n stay zero.
template <int S, int C> __device__ __forceinline__ void fetch(char *planes, const u16 *x, int first, int count, int n) {
    const int parts = min(count, n - first) * S * S * C / 8;
    const Four *from = (const Four *)(x + (long long)first * S * S * C);
    for (int i = threadIdx.x; i < parts; i += blockDim.x) copy(planes + Plane<S, C>::part(i), from + i);
}

template <int S, int C> __device__ __forceinline__ void store(const char *planes, u16 *x, int first, int count, int n) {
    const int parts = min(count, n - first) * S * S * C / 8;
    Four *to = (Four *)(x + (long long)first * S * S * C);
    for (int i = threadIdx.x; i < parts; i += blockDim.x) to[i] = *(const Four *)(planes + Plane<S, C>::part(i));
}

// Convolve the rows `top` … `top` + `rows` − 1 of I planes, from C channels to N. Each result is passed to out(pixel
// among those rows, channel, two values). With OVER, all threads finish reading before any writes, so that the output may
// overwrite the input. With BACK, compute the transposed convolution, with the weights of N → C. The warps of a block
// form a grid of DOWN groups of pixels by groups of 32 channels.
template <int S, int C, int N, int I, int MOST, int DOWN, bool POSITIVE, bool BACK, bool OVER, class Out>
__device__ __forceinline__ void convolve(
    const char *planes, const char *weights, const float *bias, int top, int rows, Out out) {
    using In = Plane<S, C>;
    constexpr int BLOCK = N < 32 ? N : 32, ACROSS = N / BLOCK, TILES = BLOCK / 8;
    constexpr int OWN = ((MOST * S * I + 15) / 16 + DOWN - 1) / DOWN, STEPS = (9 * C + 15) / 16;
    constexpr int FROM = BACK ? 9 * N : (9 * C + 15) / 16 * 16, PITCH = 2 * FROM + 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pixels = rows * S * I;
    const int column = warp % ACROSS * BLOCK, first = warp / ACROSS;
    float sums[OWN][TILES][4];
    u32 from[OWN];
#pragma unroll
    for (int m = 0; m < OWN; m++) {
        const int p = min((first + m * DOWN) * 16 + lane % 16, pixels - 1);
        const int image = p / (rows * S), inside = p % (rows * S);
        from[m] = place(planes + image * In::bytes + In::at(top + inside / S, inside % S));
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) sums[m][j][k] = BACK ? 0 : bias[column + j * 8 + lane % 4 * 2 + k % 2];
    }
    const u32 rights = place(weights) + (BACK ? lane % 16 * PITCH + (column + lane / 16 * 8) * 2
                                              : (column + lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int tap = 16 * step / C, channel = 16 * step % C;
        u32 right[TILES][2];
#pragma unroll
        for (int j = 0; j < TILES; j += 2) {
            u32 r[4];
            if (BACK) load4_turned(r, rights + channel * PITCH + (tap * N + j * 8) * 2);
            else load4(r, rights + j * 8 * PITCH + step * 32);
            right[j][0] = r[0], right[j][1] = r[1], right[j + 1][0] = r[2], right[j + 1][1] = r[3];
        }
        int offset = BACK ? -In::tap(tap) : In::tap(tap);
        if (C == 8) offset = lane < 16 ? In::tap(tap) : In::tap(tap < 8 ? tap + 1 : 8);  // two taps a step
        else offset += channel * 2 + lane / 16 * 16;
#pragma unroll
        for (int m = 0; m < OWN; m++) {
            u32 left[4];
            load4(left, from[m] + offset);
            if (POSITIVE)
#pragma unroll
                for (int k = 0; k < 4; k++) left[k] = positive(left[k]);
#pragma unroll
            for (int j = 0; j < TILES; j++) multiply(sums[m][j], left, right[j][0], right[j][1]);
        }
    }
    if (OVER) __syncthreads();
#pragma unroll
    for (int m = 0; m < OWN; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int p = (first + m * DOWN) * 16 + lane / 4 + 8 * half;
            if (p < pixels)
#pragma unroll
                for (int j = 0; j < TILES; j++)
                    out(p, column + j * 8 + lane % 4 * 2, sums[m][j][2 * half], sums[m][j][2 * half + 1]);
        }
}

// The first convolution and the max-pool: x [sets, n, SIDE, SIDE, CIN] to pooled [sets, n, POOLED, POOLED, COUT]. With
// KEEP, `codes` gets the position of each maximum among its nine pixels (the first of equal ones).
template <bool KEEP>
__device__ __forceinline__ void entry(
    const u16 *x, const u16 *weights, const float *bias, u16 *pooled, u8 *codes, int n) {
    SHARED
    using In = Plane<SIDE, CIN>;
    constexpr int MOST = 2 * ROWS + 1 < SIDE ? 2 * ROWS + 1 : SIDE, PITCH = 2 * COUT + 16, PARTS = COUT / 8;
    constexpr u32 LOWEST = 0xff80ff80u;  // twice −∞
    char *planes = shared, *matrix = planes + IMAGES * In::bytes, *strip = matrix + COUT * (2 * FLAT + 16);
    const int first = blockIdx.x * IMAGES, set = blockIdx.y, count = min(IMAGES, n - first);
    x += (long long)set * n * SIDE * SIDE * CIN, weights += set * COUT * FLAT, bias += set * COUT;
    const long long begin = (long long)(set * n + first) * POOLED * POOLED * COUT;
    fetch_weights(matrix, weights, COUT, FLAT);
    fill_zeros(planes, IMAGES * In::bytes);
    __syncthreads();
    fetch<SIDE, CIN>(planes, x, first, IMAGES, n);
    arrived();
    for (int row = 0; row < POOLED; row += ROWS) {
        const int top = max(0, 2 * row - 1), rows = min(SIDE, 2 * (row + ROWS)) - top;
        const int pooled_rows = min(ROWS, POOLED - row);
        __syncthreads();
        convolve<SIDE, CIN, COUT, IMAGES, MOST, ENTRY_WARPS, false, false, false>(
            planes, matrix, bias, top, rows,
            [&](int p, int c, float a, float b) { *(u32 *)(strip + p * PITCH + c * 2) = pack(a, b); });
        __syncthreads();
        for (int i = threadIdx.x; i < count * pooled_rows * POOLED * PARTS; i += blockDim.x) {
            const int part = i % PARTS, px = i / PARTS % POOLED, py = row + i / PARTS / POOLED % pooled_rows;
            const int image = i / PARTS / POOLED / pooled_rows;
            u32 best[4] = {LOWEST, LOWEST, LOWEST, LOWEST}, code[4] = {0, 0, 0, 0};
#pragma unroll
            for (int k = 0; k < 9; k++) {
                const int y = 2 * py - 1 + k / 3, at = 2 * px - 1 + k % 3;
                if (y < 0 || y >= SIDE || at < 0 || at >= SIDE) continue;
                const Four here = *(const Four *)(strip + ((image * rows + y - top) * SIDE + at) * PITCH + part * 16);
                const u32 values[4] = {here.x, here.y, here.z, here.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (KEEP) code[j] = greater(values[j], best[j]) & (k * 0x10001u ^ code[j]) ^ code[j];
                    best[j] = larger(values[j], best[j]);
                }
            }
            const long long to = begin + ((image * POOLED + py) * POOLED + px) * COUT + part * 8;
            *(Four *)(pooled + to) = Four{best[0], best[1], best[2], best[3]};
            if (KEEP)
                for (int j = 0; j < 2; j++)
                    ((u32 *)(codes + to))[j] = bytes(code[2 * j]) | bytes(code[2 * j + 1]) << 16;
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * ENTRY_WARPS * ACROSS, 2)
    entry_forward(const u16 *x, const u16 *weights, const float *bias, u16 *pooled, u8 *codes, int n) {
    entry<true>(x, weights, bias, pooled, codes, n);
}

extern "C" __global__ void __launch_bounds__(32 * ENTRY_WARPS * ACROSS, 2)
    entry_inference(const u16 *x, const u16 *weights, const float *bias, u16 *pooled, int n) {
    entry<false>(x, weights, bias, pooled, nullptr, n);
}

// The two residual units: x [sets, n, POOLED, POOLED, COUT] to `out`. `kept` [3, sets, n, …], unless null, gets the first
// unit's hidden layer after its ReLU, the first unit's output, and the second unit's hidden layer.
extern "C" __global__ void __launch_bounds__(32 * UNITS_WARPS * ACROSS, 2)
    units_forward(const u16 *x, const u16 *weights, const float *bias, u16 *out, u16 *kept, int n) {
    SHARED
    using In = Plane<POOLED, COUT>;
    constexpr int SIZE = COUT * 9 * COUT;
    char *stream = shared, *inner = stream + IMAGES * In::bytes, *matrix = inner + IMAGES * In::bytes;
    const int first = blockIdx.x * IMAGES, set = blockIdx.y;
    const long long set_size = (long long)n * POOLED * POOLED * COUT;
    const long long all = gridDim.y * set_size, begin = set * set_size;
    weights += 4 * set * SIZE, bias += 4 * set * COUT;
    fill_zeros(shared, 2 * IMAGES * In::bytes);
    __syncthreads();
    fetch<POOLED, COUT>(stream, x + begin, first, IMAGES, n);
    auto store_inner = [&](int p, int c, float a, float b) {
        *(u32 *)(inner + In::pixel(p) + c * 2) = positive(pack(a, b));
    };
    auto back = [&](int p, int c, float a, float b) {
        u32 *value = (u32 *)(stream + In::pixel(p) + c * 2);
        *value = sum(*value, pack(a, b));
    };
    for (int unit = 0; unit < 2; unit++) {
        fetch_weights(matrix, weights + 2 * unit * SIZE, COUT, 9 * COUT);
        arrived();
        __syncthreads();
        convolve<POOLED, COUT, COUT, IMAGES, POOLED, UNITS_WARPS, true, false, false>(
            stream, matrix, bias + 2 * unit * COUT, 0, POOLED, store_inner);
        __syncthreads();
        fetch_weights(matrix, weights + (2 * unit + 1) * SIZE, COUT, 9 * COUT);
        if (kept) store<POOLED, COUT>(inner, kept + 2 * unit * all + begin, first, IMAGES, n);
        arrived();
        __syncthreads();
        convolve<POOLED, COUT, COUT, IMAGES, POOLED, UNITS_WARPS, false, false, false>(
            inner, matrix, bias + (2 * unit + 1) * COUT, 0, POOLED, back);
        __syncthreads();
        if (unit == 0 && kept) store<POOLED, COUT>(stream, kept + all + begin, first, IMAGES, n);
    }
    store<POOLED, COUT>(stream, out + begin, first, IMAGES, n);
}

// Backward pass of a ReLU: keep the gradient `step` where the ReLU was active, and add it to `to` unless both are the
// same memory. The result is also stored in `out`.
template <int S, int C>
__device__ __forceinline__ void relu_backward(
    const char *step, char *to, const u16 *mask, u16 *out, int first, int count, int n) {
    const int parts = min(count, n - first) * S * S * C / 8;
    const long long begin = (long long)first * S * S * C;
    for (int i = threadIdx.x; i < parts; i += blockDim.x) {
        const int at = Plane<S, C>::part(i);
        const Four was = ((const Four *)(mask + begin))[i], gradient = *(const Four *)(step + at);
        Four next{let(was.x, gradient.x), let(was.y, gradient.y), let(was.z, gradient.z), let(was.w, gradient.w)};
        if (to != step) {
            const Four before = *(const Four *)(to + at);
            next = Four{sum(before.x, next.x), sum(before.y, next.y), sum(before.z, next.z), sum(before.w, next.w)};
        }
        *(Four *)(to + at) = next, ((Four *)(out + begin))[i] = next;
    }
}

// Backward pass of the residual units. `grad` is the gradient of the output. `grads` [3, sets, n, …] gets those of the
// outputs of the first three convolutions, and `down` that of the input, which is `before`.
extern "C" __global__ void __launch_bounds__(32 * UNITS_WARPS * ACROSS, 2)
    units_backward(
        const u16 *before, const u16 *kept, const u16 *weights, const u16 *grad, u16 *grads, u16 *down, int n) {
    SHARED
    using In = Plane<POOLED, COUT>;
    constexpr int SIZE = COUT * 9 * COUT;
    char *stream = shared, *inner = stream + IMAGES * In::bytes, *matrix = inner + IMAGES * In::bytes;
    const int first = blockIdx.x * IMAGES, set = blockIdx.y;
    const long long set_size = (long long)n * POOLED * POOLED * COUT;
    const long long all = gridDim.y * set_size, begin = set * set_size;
    weights += 4 * set * SIZE, before += begin, kept += begin, grads += begin, down += begin;
    fill_zeros(shared, 2 * IMAGES * In::bytes);
    __syncthreads();
    fetch<POOLED, COUT>(stream, grad + begin, first, IMAGES, n);
    auto into = [&](int p, int c, float a, float b) { *(u32 *)(inner + In::pixel(p) + c * 2) = pack(a, b); };
    for (int unit = 1; unit >= 0; unit--) {
        fetch_weights(matrix, weights + (2 * unit + 1) * SIZE, COUT, 9 * COUT);
        arrived();
        __syncthreads();
        convolve<POOLED, COUT, COUT, IMAGES, POOLED, UNITS_WARPS, false, true, false>(
            stream, matrix, nullptr, 0, POOLED, into);
        __syncthreads();
        fetch_weights(matrix, weights + 2 * unit * SIZE, COUT, 9 * COUT);
        relu_backward<POOLED, COUT>(inner, inner, kept + 2 * unit * all, grads + 2 * unit * all, first, IMAGES, n);
        arrived();
        __syncthreads();
        convolve<POOLED, COUT, COUT, IMAGES, POOLED, UNITS_WARPS, false, true, true>(
            inner, matrix, nullptr, 0, POOLED, into);
        __syncthreads();
        relu_backward<POOLED, COUT>(
            inner, stream, unit ? kept + all : before, unit ? grads + all : down, first, IMAGES, n);
    }
}

// Backward pass of the max-pool for rows `top` … of one image, where `top` is even: each gradient is added at the
// position of its maximum. A thread has eight channels of 2 × 2 pixels, which belong to up to four windows of the pool. It calls
// put(row among those, column, part, values) for the first N channels.
template <int N, class Put>
__device__ __forceinline__ void unpool(const u16 *pooled, const u8 *codes, int top, int rows, Put put) {
    constexpr int PARTS = N / 8;
    for (int i = threadIdx.x; i < (rows + 1) / 2 * POOLED * PARTS; i += blockDim.x) {
        const int part = i % PARTS, px = i / PARTS % POOLED, py = top / 2 + i / PARTS / POOLED;
        u32 sums[4][4] = {};
#pragma unroll
        for (int window = 0; window < 4; window++) {
            const int wy = py + window / 2, wx = px + window % 2;
            if (wy >= POOLED || wx >= POOLED) continue;
            const int from = (wy * POOLED + wx) * COUT + part * 8;
            const Four grads = *(const Four *)(pooled + from);
            const u32 values[4] = {grads.x, grads.y, grads.z, grads.w};
            const u32 four[2] = {((const u32 *)(codes + from))[0], ((const u32 *)(codes + from))[1]};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u32 code_pair = __byte_perm(four[k / 2], 0, k % 2 ? 0x4342 : 0x4140);  // two codes, in halves
#pragma unroll
                for (int pixel = 0; pixel < 4; pixel++) {
                    const int ky = pixel / 2 + 1 - window / 2 * 2, kx = pixel % 2 + 1 - window % 2 * 2;
                    const u32 position = (ky * 3 + kx) * 0x10001u;
                    if (ky >= 0 && kx >= 0)
                        sums[pixel][k] = sum(sums[pixel][k], values[k] & same(code_pair, position));
                }
            }
        }
#pragma unroll
        for (int pixel = 0; pixel < 4; pixel++) {
            const int y = 2 * py + pixel / 2, x = 2 * px + pixel % 2;
            if (y - top < rows && x < SIDE)
                put(y - top, x, part, Four{sums[pixel][0], sums[pixel][1], sums[pixel][2], sums[pixel][3]});
        }
    }
}

#if CIN >= 16
// Gradient of the stage's input, `down` [sets, n, SIDE, SIDE, CIN], from that of the pooled images.
extern "C" __global__ void __launch_bounds__(32 * ENTRY_BACKWARD_WARPS * BACK_ACROSS, 2)
    entry_backward(const u16 *pooled, const u8 *codes, const u16 *weights, u16 *down, int n) {
    SHARED
    using In = Plane<SIDE, COUT>;
    char *plane = shared, *matrix = plane + In::bytes;
    const long long image = blockIdx.y * n + blockIdx.x, offset = image * POOLED * POOLED * COUT;
    fetch_weights(matrix, weights + blockIdx.y * COUT * FLAT, COUT, FLAT);
    fill_zeros(plane, In::bytes);
    __syncthreads();
    unpool<COUT>(pooled + offset, codes + offset, 0, SIDE, [&](int y, int x, int part, Four values) {
        *(Four *)(plane + In::at(y, x) + part * 16) = values;
    });
    arrived();
    __syncthreads();
    u16 *to = down + image * SIDE * SIDE * CIN;
    convolve<SIDE, COUT, CIN, 1, SIDE, ENTRY_BACKWARD_WARPS, false, true, false>(
        plane, matrix, nullptr, 0, SIDE,
        [&](int p, int c, float a, float b) { *(u32 *)(to + p * CIN + c) = pack(a, b); });
}
#endif

// Gradients of weights and biases of one convolution from C to COUT channels. A block computes N of them, from `first`
// on, for every gridDim.x-th image. A warp has TAPS taps of one row of the filter and every TAPS-th 16 pixels. Each block
// writes its part of `gradients` [gridDim.x, COUT · 9 · C + COUT], biases last.
template <int S, int C, int STRIP, bool POSITIVE, class Fill>
__device__ __forceinline__ void weight_gradient(
    const u16 *x, float *gradients, int first, int n, char *shared, Fill fill) {
    using In = Plane<S, C>;
    constexpr int N = SLICE, PITCH = 2 * N + 16, DOWN = N / 16, ACROSS = C / 8, TAPS = N * C > 512 ? 1 : 3;
    constexpr int STEP = 16 * TAPS, OWN = (TAPS * ACROSS + 1) * DOWN * 4;
    constexpr u32 ONES = 0x3f803f80u;
    constexpr int TOP = (S - 1) / STRIP * STRIP, LAST = ((S - TOP) * S + 15) / 16 * 16 - 1;  // of the last strip's 16s
    constexpr int REACH = In::gap + (TOP + LAST / S + 2) * In::row + (LAST % S + 2) * In::pitch;
    constexpr int FULL = In::bytes + (STRIP * S + 1) * PITCH;
    char *plane = shared, *strip = plane + In::bytes;  // the strip's last pixel is zero
    const int lane = threadIdx.x % 32, tap = threadIdx.x / 32 % (9 / TAPS) * TAPS, share = threadIdx.x / 32 / (9 / TAPS);
    float sums[TAPS * ACROSS + 1][DOWN][4];  // the last is of the gradients alone
#pragma unroll
    for (int k = 0; k < OWN; k++) (&sums[0][0][0])[k] = 0;
    fill_zeros(plane, REACH > FULL ? REACH : FULL);
    for (int image = blockIdx.x; image < n; image += gridDim.x) {
        __syncthreads();
        fetch<S, C>(plane, x, image, 1, n);
        for (int top = 0; top < S; top += STRIP) {
            const int rows = min(STRIP, S - top), pixels = rows * S;
            if (top > 0) __syncthreads();
            fill(strip, image, top, rows);
            arrived();
            __syncthreads();
            // Addresses of this lane's pixels: contiguous in the gradient, with gaps between rows in x. Past the end both
            // are zero.
            int p = 16 * share + lane % 8 + lane / 16 * 8, q = 16 * share + lane % 16;
            u32 lefts = place(strip + p * PITCH) + lane / 8 % 2 * 16, nothing = place(strip + STRIP * S * PITCH);
            u32 rights = place(plane + In::at(top + q / S, q % S) + In::tap(tap)) + (C == 8 ? 0 : lane / 16 * 16);
            q %= S;
            for (int begin = 16 * share; begin < pixels; begin += STEP) {
                u32 left[DOWN][4];
#pragma unroll
                for (int i = 0; i < DOWN; i++) {
                    load4_turned(left[i], (p < pixels ? lefts : nothing) + i * 32);
                    if (tap == 0) multiply(sums[TAPS * ACROSS][i], left[i], ONES, ONES);
                }
#pragma unroll
                for (int t = 0; t < TAPS; t++)
#pragma unroll
                    for (int j = 0; j < ACROSS; j += 2) {
                        u32 right[4];
                        load4_turned(right, rights + t * In::pitch + j * 16);
#pragma unroll
                        for (int k = 0; k < 4; k++)
                            if (POSITIVE) right[k] = positive(right[k]);
#pragma unroll
                        for (int i = 0; i < DOWN; i++) {
                            multiply(sums[t * ACROSS + j][i], left[i], right[0], right[1]);
                            if (ACROSS > 1) multiply(sums[t * ACROSS + j + 1][i], left[i], right[2], right[3]);
                        }
                    }
                p += STEP, lefts += STEP * PITCH, q += STEP % S, rights += STEP / S * In::row + STEP % S * In::pitch;
                if (q >= S) q -= S, rights += In::gap;
            }
        }
    }
    // Add up the sums of all shares in the first one, through the memory of the images.
    float *passed = (float *)shared;
    const int rank = threadIdx.x % (288 / TAPS);
#pragma unroll
    for (int s = 1; s < TAPS; s++) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < OWN; k++)
            if (share == s) passed[k * (288 / TAPS) + rank] = (&sums[0][0][0])[k];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < OWN; k++)
            if (share == 0) (&sums[0][0][0])[k] += passed[k * (288 / TAPS) + rank];
    }
    gradients += (long long)blockIdx.x * (COUT * 9 * C + COUT);
    if (share > 0) return;
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int row = first + 16 * i + lane / 4 + k / 2 * 8;
#pragma unroll
            for (int j = 0; j < TAPS * ACROSS; j++)
                gradients[(row * 9 + tap + j / ACROSS) * C + 8 * (j % ACROSS) + lane % 4 * 2 + k % 2] = sums[j][i][k];
            if (tap == 0 && lane % 4 == 0 && k % 2 == 0) gradients[COUT * 9 * C + row] = sums[TAPS * ACROSS][i][k];
        }
}

// Weight gradients of the entry, [sets, gridDim.x, …], for the blockIdx.z-th slice of its outputs, in strips of rows.
extern "C" __global__ void __launch_bounds__(288, 2)
    entry_weight_gradient(const u16 *x, const u16 *pooled, const u8 *codes, float *gradients, int n) {
    SHARED
    constexpr int PITCH = 2 * SLICE + 16;
    const int set = blockIdx.y, first = blockIdx.z * SLICE;
    x += (long long)set * n * SIDE * SIDE * CIN, gradients += (long long)set * gridDim.x * (COUT * 9 * CIN + COUT);
    auto fill = [&](char *strip, int image, int top, int rows) {
        const long long offset = (long long)(set * n + image) * POOLED * POOLED * COUT + first;
        unpool<SLICE>(pooled + offset, codes + offset, top, rows, [&](int y, int x, int part, Four values) {
            *(Four *)(strip + (y * SIDE + x) * PITCH + part * 16) = values;
        });
    };
    weight_gradient<SIDE, CIN, ENTRY_STRIP, false>(x, gradients, first, n, shared, fill);
}

// Weight gradients of the residual units, [sets, 4, gridDim.x, …], for a slice of the outputs of one convolution. `before`
// and `kept` are the input and the activations of `units_forward`; `grad` and `grads` are those of `units_backward`.
extern "C" __global__ void __launch_bounds__(288, 2)
    units_weight_gradient(
        const u16 *before, const u16 *kept, const u16 *grad, const u16 *grads, float *gradients, int n) {
    SHARED
    constexpr int PITCH = 2 * SLICE + 16, PARTS = SLICE / 8;
    const int set = blockIdx.y, sets = gridDim.y, which = blockIdx.z % 4, first = blockIdx.z / 4 * SLICE;
    const long long size = (long long)n * POOLED * POOLED * COUT;
    const u16 *x = which == 0 ? before + set * size : kept + ((which - 1) * sets + set) * size;
    const u16 *from = (which == 3 ? grad + set * size : grads + (which * sets + set) * size) + first;
    gradients += (long long)(4 * set + which) * gridDim.x * (COUT * 9 * COUT + COUT);
    auto fill = [&](char *strip, int image, int top, int rows) {
        const u16 *source = from + (long long)image * POOLED * POOLED * COUT;
        for (int i = threadIdx.x; i < POOLED * POOLED * PARTS; i += blockDim.x)
            copy(strip + i / PARTS * PITCH + i % PARTS * 16, source + i / PARTS * COUT + i % PARTS * 8);
    };
    // the input of a unit comes before its ReLU, a hidden layer after it
    if (which % 2) weight_gradient<POOLED, COUT, POOLED, false>(x, gradients, first, n, shared, fill);
    else weight_gradient<POOLED, COUT, POOLED, true>(x, gradients, first, n, shared, fill);
}
