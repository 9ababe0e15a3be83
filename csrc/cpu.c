/* Detection of the CPU's instruction sets. */
#define _GNU_SOURCE
#include "shoal.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

static uint64_t enabled_states(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Intel's dot products of bfloat16 are no faster than those of float32, and used only together with AMX. */
static int is_amd(void) {
    uint32_t a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
}

/* Whether the CPU has AMX with bfloat16, and the system lets this process use it, which must be requested. */
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
