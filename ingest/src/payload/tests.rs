use proptest::prelude::*;

use super::*;

fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&format!("file://{}", folder.path().display())).unwrap();
    (folder, store)
}

#[tokio::test]
async fn a_payload_is_read_as_it_was_written_and_only_by_its_tenant() {
    let (_folder, store) = store();
    let bytes = Bytes::from(token_bytes(&[1, 70_000, 3]));
    let payload = store.put("a", bytes.clone(), TOKEN_IDS).await.unwrap();
    assert_eq!(store.put("a", bytes.clone(), TOKEN_IDS).await.unwrap(), payload);
    store.look("a", &payload).await.unwrap();
    assert_eq!(store.get("a", &payload).await.unwrap(), bytes);
    assert!(matches!(store.get("b", &payload).await, Err(Error::Missing)));
    assert!(matches!(store.look("b", &payload).await, Err(Error::Missing)));
    store.delete("a", &payload.digest).await.unwrap();
    store.delete("a", &payload.digest).await.unwrap();
    assert!(matches!(store.get("a", &payload).await, Err(Error::Missing)));
}

#[tokio::test]
async fn a_payload_of_another_size_or_with_a_flipped_bit_is_not_it() {
    let (folder, store) = store();
    let payload = store
        .put("a", Bytes::from_static(b"12345678"), TOKEN_IDS)
        .await
        .unwrap();
    let short = PayloadRef {
        size_bytes: 7,
        ..payload.clone()
    };
    assert!(matches!(store.look("a", &short).await, Err(Error::Differs(_))));
    assert!(matches!(store.get("a", &short).await, Err(Error::Differs(_))));
    let path = folder.path().join(key("a", &payload.digest).as_ref());
    std::fs::write(path, b"12345679").unwrap();
    store.look("a", &payload).await.unwrap();
    assert!(matches!(store.get("a", &payload).await, Err(Error::Differs(_))));
}

#[test]
fn a_tenant_may_be_called_anything() {
    for tenant in ["../../etc", "", "a/b", "\u{1F600}"] {
        let key = key(tenant, &[7; 32]);
        assert_eq!(key.parts().count(), 3, "{key}");
    }
}

#[test]
fn half_a_token_id_is_none() {
    assert_eq!(token_ids(&[1, 0, 0, 0, 2]), None);
    assert_eq!(token_ids(&token_bytes(&[u32::MAX, 0])), Some(vec![u32::MAX, 0]));
}

fn experts(experts: u16) -> Experts {
    Experts {
        first: 199_000,
        layers: 3,
        per_layer: 2,
        experts,
        ids: vec![0, 1, 2, 3, 4, experts - 1, 7, 6, 5, 4, 3, 2],
    }
}

#[test]
fn expert_ids_take_one_byte_up_to_256_experts_and_two_beyond() {
    for (count, bytes) in [(8, 12), (256, 12), (257, 24), (384, 24)] {
        let told = experts(count);
        let written = told.encode().unwrap();
        assert_eq!(written.len(), 32 + bytes);
        assert_eq!(Experts::decode(&written).unwrap(), told);
        assert_eq!((told.tokens(), told.of(1).unwrap()[0], told.of(2)), (2, 7, None));
    }
}

#[test]
fn what_is_not_exactly_expert_ids_is_refused() {
    let good = experts(384).encode().unwrap();
    for cut in 0..good.len() {
        assert!(Experts::decode(&good[..cut]).is_err(), "{cut} bytes");
    }
    for (at, with) in [(0, b'X'), (8, 2), (12, 3), (20, 0), (22, 5), (25, 0), (26, 1), (33, 9)] {
        let mut bad = good.clone();
        bad[at] = with;
        assert!(Experts::decode(&bad).is_err(), "byte {at}");
    }
    assert!(
        Experts {
            experts: 7,
            ..experts(384)
        }
        .encode()
        .is_err()
    );
}

proptest! {
    #[test]
    fn any_bytes_are_expert_ids_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), whole in any::<bool>()) {
        if whole && bytes.len() >= 12 {
            bytes[..8].copy_from_slice(b"SPTEXPRT");
            bytes[8..12].copy_from_slice(&[1, 0, 0, 0]);
        }
        if let Ok(experts) = Experts::decode(&bytes) {
            prop_assert_eq!(experts.encode().unwrap(), bytes);
        }
    }
}

#[tokio::test]
async fn payloads_are_listed_with_their_age_and_what_is_no_payload_is_not() {
    let (folder, store) = store();
    let payload = store.put("a", Bytes::from_static(b"1234"), TOKEN_IDS).await.unwrap();
    for other in ["payload/readme", "payload/zz/00", "elsewhere/file"] {
        let path = folder.path().join(other);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"not a payload").unwrap();
    }
    let listed = async || -> Vec<Object> { store.objects().try_collect().await.unwrap() };
    let [object] = &listed().await[..] else {
        panic!("one payload is there")
    };
    assert_eq!((object.tenant, object.digest), (tenant_hash("a"), payload.digest));
    assert_eq!(
        store.written_at("a", &payload.digest).await.unwrap(),
        Some(object.written_at)
    );
    let second = time::Duration::SECOND;
    assert!(!store.is_older(object, object.written_at - second).await.unwrap());
    assert!(store.is_older(object, object.written_at + second).await.unwrap());
    store.remove(object).await.unwrap();
    assert!(!store.is_older(object, object.written_at + second).await.unwrap());
    assert_eq!(listed().await, []);
}
