/* Threads, and what the CPU can do. */
#define _GNU_SOURCE
#include "shoal.h"

#include <cpuid.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

/* As in torch/csrc/stable/c/shim.h; 0 is success. */
typedef int32_t (*parallel_for_fn)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *);
typedef int32_t (*num_threads_fn)(uint32_t *);

static parallel_for_fn parallel_for;
static num_threads_fn num_threads;

/* Take torch's functions; without them everything runs in the calling thread. */
void shoal_use_threads(void *torch_parallel_for, void *torch_get_num_threads) {
    parallel_for = (parallel_for_fn)torch_parallel_for;
    num_threads = (num_threads_fn)torch_get_num_threads;
}

int64_t shoal_threads(void) {
    uint32_t count = 1;
    if (num_threads && num_threads(&count)) count = 1;
    return count;
}

struct work {
    atomic_llong next;
    int64_t count;
    shoal_task task;
    void *context;
};

static void take_tasks(int64_t begin, int64_t end, void *context) {
    (void)begin, (void)end;
    struct work *work = context;
    int64_t index;
    while ((index = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed)) < work->count)
        work->task(work->context, index);
}

void shoal_parallel(int64_t count, shoal_task task, void *context) {
    struct work work = {.next = 0, .count = count, .task = task, .context = context};
    int64_t threads = shoal_threads();
    if (threads > count) threads = count;
    if (threads < 2 || !parallel_for || parallel_for(0, threads, 1, take_tasks, &work))
        take_tasks(0, 1, &work); /* what a failed call has left */
}

static uint64_t enabled_states(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Intel's dot products of bfloat16 are no faster than those of float32, and wanted only beside AMX. */
static int is_amd(void) {
    uint32_t a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
}

/* Whether the CPU has AMX with bfloat16, and the system lets this process use it, which has to be asked. */
static int has_amx(uint32_t features, uint64_t states) {
    enum { BF16 = 1 << 22, TILE = 1 << 24, ASK = 0x1023, TILE_DATA = 18 };
    const uint32_t wanted = BF16 | TILE;
    return (features & wanted) == wanted && (states & 0x60000) == 0x60000 && !syscall(SYS_arch_prctl, ASK, TILE_DATA);
}

/* Bits: 1 AVX2 with FMA and F16C, 2 AVX-512 (F, BW, DQ, VL), 4 its VNNI, 8 its BF16 where that is fast or AMX can be
   used, 16 AMX. */
int64_t shoal_cpu_features(void) {
    uint32_t a, b, c, d, c1;
    if (!__get_cpuid(1, &a, &b, &c1, &d) || !(c1 & bit_OSXSAVE)) return 0;
    uint64_t states = enabled_states();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    int64_t features = 0;
    int fma = (c1 & bit_FMA) && (c1 & bit_F16C) && (c1 & bit_AVX);
    if ((states & 0x6) == 0x6 && fma && (b & bit_AVX2)) features |= 1;
    uint32_t wanted = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if (!features || (states & 0xe6) != 0xe6 || (b & wanted) != wanted) return features;
    features |= 2;
    if (c & bit_AVX512VNNI) features |= 4;
    const uint32_t tiles = d;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & bit_AVX512BF16)) return features;
    if (has_amx(tiles, states)) return features | 8 | 16;
    return is_amd() ? features | 8 : features;
}
