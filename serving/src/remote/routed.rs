//! The experts that an engine's model used, as vLLM returns them (`--enable-return-routed-experts`): a NumPy array
//! `[tokens, layers, experts a token]` in base64, with the last event of an answer. The tokens are the prompt's and the
//! sampled ones but the last, which was not read.

use anyhow::{Context, bail, ensure};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use model::router::Routing;

const MAGIC: &[u8] = b"\x93NUMPY";
/// Of an array: tokens, layers, experts.
const AXES: usize = 3;

/// Reads the array. It may have the layers without experts too.
pub fn read(base64: &str) -> anyhow::Result<Routing> {
    let file = BASE64_STANDARD.decode(base64)?;
    let rest = file.strip_prefix(MAGIC).context("it is no NumPy array")?;
    let (version, rest) = rest.split_first_chunk::<2>().context("it ends early")?;
    let (length, rest) = match version {
        [1, _] => {
            let (length, rest) = rest.split_first_chunk().context("it ends early")?;
            (usize::from(u16::from_le_bytes(*length)), rest)
        }
        _ => {
            let (length, rest) = rest.split_first_chunk().context("it ends early")?;
            (u32::from_le_bytes(*length) as usize, rest)
        }
    };
    let (header, ids) = rest.split_at_checked(length).context("it ends early")?;
    let header = std::str::from_utf8(header)?;
    ensure!(header.contains("'fortran_order': False"), "its order is {header}");
    let shape = between(header, "'shape': (", ")").context("it has no shape")?;
    let shape: Vec<usize> = shape
        .split(',')
        .map(str::trim)
        .filter(|size| !size.is_empty())
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let &[tokens, layers, chosen] = shape.as_slice() else {
        bail!("it has {} axes, not {AXES}", shape.len());
    };
    let width = match between(header, "'descr': '", "'") {
        Some("|u1" | "|i1") => 1,
        Some("<u2" | "<i2") => 2,
        Some("<u4" | "<i4") => 4,
        Some("<u8" | "<i8") => 8,
        other => bail!("its numbers are {other:?}"),
    };
    let count = tokens.checked_mul(layers).and_then(|count| count.checked_mul(chosen));
    ensure!(
        count.and_then(|count| count.checked_mul(width)) == Some(ids.len()) && chosen > 0,
        "{} bytes do not make {shape:?}",
        ids.len()
    );
    let id = |bytes: &[u8]| {
        let id = bytes.iter().rev().fold(0_u64, |sum, &byte| sum << 8 | u64::from(byte));
        let id = u16::try_from(id).context("an id of an expert is negative or too large");
        id.map(u32::from)
    };
    let ids: Vec<u32> = ids.chunks_exact(width).map(id).collect::<anyhow::Result<_>>()?;
    let mut routing = Routing::default();
    for layer in 0..layers {
        let of_token = |token: usize| &ids[(token * layers + layer) * chosen..][..chosen];
        let of_layer = (0..tokens).flat_map(of_token).copied();
        routing.record(layer as i64, of_layer.collect());
    }
    Ok(routing)
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let rest = text.split_once(before)?.1;
    Some(rest.split_once(after)?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn npy(descr: &str, shape: &str, ids: &[u8]) -> String {
        let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}\n");
        let length = (header.len() as u16).to_le_bytes();
        BASE64_STANDARD.encode([MAGIC, &[1, 0], &length, header.as_bytes(), ids].concat())
    }

    #[test]
    fn each_layer_has_the_experts_of_all_tokens() {
        let ids = [0, 1, 2, 3, 4, 5, 6, 7];
        let routing = read(&npy("|u1", "2, 2, 2", &ids)).unwrap();
        assert_eq!(routing.layers(), [(0, vec![0, 1, 4, 5]), (1, vec![2, 3, 6, 7])]);
        let wide: Vec<u8> = ids.iter().flat_map(|&id| i32::from(id).to_le_bytes()).collect();
        assert_eq!(read(&npy("<i4", "2, 2, 2", &wide)).unwrap(), routing);
        for wrong in [
            npy("|u1", "2, 2, 3", &ids),
            npy("|u1", "2, 4", &ids),
            npy("<f4", "2, 1, 1", &ids),
            npy("<i4", "2, 1, 1", &[255; 8]),
            BASE64_STANDARD.encode(ids),
            "?".into(),
        ] {
            assert!(read(&wrong).is_err());
        }
    }
}
