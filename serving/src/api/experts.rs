//! Encodes which experts a mixture-of-experts model used, as a payload that is stored before its
//! generation is logged.

use event_log::payload::{Experts, Malformed};
use model::router::Routing;

/// The payload of type [`event_log::payload::EXPERTS`]: the routing of the first `tokens` tokens, by
/// token, then layer. `count`: experts per layer.
pub fn encode(routing: &Routing, tokens: usize, count: u16) -> Result<Vec<u8>, Malformed> {
    let layers = routing.layers();
    let per_layer = layers.first().map_or(0, |(_, ids)| ids.len() / tokens.max(1));
    let mut ids = Vec::with_capacity(tokens * layers.len() * per_layer);
    for token in 0..tokens {
        for (_, of_layer) in layers {
            let of_token = of_layer.iter().skip(token * per_layer).take(per_layer);
            // an id above 16 bits is above `count` too, and `Experts::encode` refuses that
            ids.extend(of_token.map(|&id| u16::try_from(id).unwrap_or(u16::MAX)));
        }
    }
    let narrow = |number: usize| u16::try_from(number).unwrap_or(u16::MAX);
    let experts = Experts {
        first: 0,
        layers: narrow(layers.len()),
        per_layer: narrow(per_layer),
        experts: count,
        ids,
    };
    experts.encode()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_ordered_by_token_then_layer() {
        let mut routing = Routing::default();
        routing.record(1, vec![0, 2, 1, 3]);
        routing.record(3, vec![4, 5, 0, 1]);
        let read = Experts::decode(&encode(&routing, 2, 6).unwrap()).unwrap();
        assert_eq!((read.first, read.layers, read.per_layer, read.experts), (0, 2, 2, 6));
        assert_eq!(read.of(0).unwrap(), [0, 2, 4, 5]);
        assert_eq!(read.of(1).unwrap(), [1, 3, 0, 1]);
        assert!(encode(&routing, 2, 5).is_err(), "an id that no layer has");
    }
}
