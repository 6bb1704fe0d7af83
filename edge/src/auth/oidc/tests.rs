use super::*;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use jsonwebtoken::{EncodingKey, Header, encode};
use openssl::rsa::Rsa;
use serde_json::json;

/// A provider that signs whatever a test says. A real one signs nothing wrong: `make check NAME=browser` asks one.
struct Issuer {
    url: String,
    served: Arc<Mutex<Value>>,
}

struct Pair {
    id: &'static str,
    secret: EncodingKey,
    public: Value,
    public_pem: Vec<u8>,
}

fn pair(id: &'static str) -> Pair {
    let rsa = Rsa::generate(2048).unwrap();
    let number = |number: &openssl::bn::BigNumRef| BASE64.encode(number.to_vec());
    Pair {
        id,
        secret: EncodingKey::from_rsa_pem(&rsa.private_key_to_pem().unwrap()).unwrap(),
        public: json!({"kty": "RSA", "use": "sig", "alg": "RS256", "kid": id, "n": number(rsa.n()), "e": number(rsa.e())}),
        public_pem: rsa.public_key_to_pem().unwrap(),
    }
}

impl Issuer {
    async fn start(keys: &[&Pair]) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let served = Arc::new(Mutex::new(json!({})));
        let discovery = json!({"issuer": &url, "authorization_endpoint": format!("{url}/auth?tenant=a"),
                               "token_endpoint": format!("{url}/token"), "jwks_uri": format!("{url}/keys")});
        let (keys_served, token_served) = (Arc::clone(&served), Arc::clone(&served));
        let router = Router::new()
            .route("/.well-known/openid-configuration", get(async || Json(discovery)))
            .route(
                "/keys",
                get(async move || Json(keys_served.lock().unwrap()["keys"].clone())),
            )
            .route(
                "/token",
                post(async move |form: String| {
                    let served = token_served.lock().unwrap();
                    let fits = served["form"].as_array().unwrap().iter();
                    match fits.map(|part| part.as_str().unwrap()).all(|part| form.contains(part)) {
                        true => Ok(Json(json!({"id_token": served["id_token"], "token_type": "Bearer"}))),
                        false => Err((StatusCode::BAD_REQUEST, Json(json!({"error": "invalid_grant"})))),
                    }
                }),
            );
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let issuer = Issuer { url, served };
        issuer.set_keys(keys);
        issuer
    }

    fn set_keys(&self, keys: &[&Pair]) {
        let unknown = json!({"kty": "XYZ", "kid": "of-the-future"});
        let keys: Vec<Value> = keys.iter().map(|pair| pair.public.clone()).chain([unknown]).collect();
        self.served.lock().unwrap()["keys"] = json!({"keys": keys});
    }

    fn provider(&self) -> Provider {
        let options = json!({
            "issuer": self.url, "client_id": "page", "redirect_url": "http://127.0.0.1:1/login/callback",
            "groups": [{"name": "sre", "role": "release"}, {"name": "lab", "scopes": ["texts"]},
                       {"name": "acme", "role": "admin", "tenant": "acme"}],
        });
        let options: OidcOptions = serde_json::from_value(options).unwrap();
        options.check().unwrap();
        Provider {
            try_every: Duration::ZERO,
            ..Provider::new(options)
        }
    }

    /// What a token of Ada says.
    fn claims(&self, more: &Value) -> Value {
        let now = time::OffsetDateTime::now_utc().unix_timestamp();
        let mut claims = json!({"iss": self.url, "aud": "springtide", "sub": "u1", "client_id": "ci", "iat": now,
                                "exp": now + 600, "email": "ada@example.com", "groups": ["sre", "lab", "acme", "others"]});
        claims
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        claims
    }
}

fn signed(pair: &Pair, typ: &str, claims: &Value) -> String {
    let header = Header {
        kid: Some(pair.id.to_owned()),
        typ: Some(typ.to_owned()),
        ..Header::new(Algorithm::RS256)
    };
    encode(&header, claims, &pair.secret).unwrap()
}

#[tokio::test]
async fn groups_say_what_the_holder_of_a_token_may_do() {
    let pair = pair("a");
    let issuer = Issuer::start(&[&pair]).await;
    let provider = issuer.provider();
    let machine = signed(&pair, "at+jwt", &issuer.claims(&json!({})));
    let machine = provider.verify(&machine, Use::Access).await.unwrap();
    assert_eq!(
        (machine.tenant.as_str(), machine.label.as_str()),
        ("default", "ci (u1)")
    );
    assert_eq!(
        machine.scopes.names(),
        ["read", "texts", "release"],
        "not those of the other tenant"
    );
    assert!(!machine.is_person);
    let person = issuer.claims(&json!({"aud": ["page", "x"], "azp": "page", "groups": "acme"}));
    let person = provider
        .verify(&signed(&pair, "JWT", &person), Use::Page)
        .await
        .unwrap();
    assert_eq!(
        (person.tenant.as_str(), person.label.as_str()),
        ("acme", "ada@example.com (u1)")
    );
    assert!(person.is_person && person.key == machine.key, "the same subject");
    let other = signed(&pair, "at+jwt", &issuer.claims(&json!({"sub": "u2"})));
    assert_ne!(provider.verify(&other, Use::Access).await.unwrap().key, machine.key);
    for none in [
        json!({"groups": ["others"]}),
        json!({"groups": null}),
        json!({"groups": {"sre": true}}),
    ] {
        let problem = provider
            .verify(&signed(&pair, "at+jwt", &issuer.claims(&none)), Use::Access)
            .await
            .unwrap_err();
        assert_eq!(problem.status, StatusCode::FORBIDDEN, "{none}");
    }
}

#[tokio::test]
async fn a_token_that_is_wrong_in_one_thing_is_refused() {
    let (good, forger) = (pair("a"), pair("a"));
    let issuer = Issuer::start(&[&good]).await;
    let provider = issuer.provider();
    let now = time::OffsetDateTime::now_utc().unix_timestamp();
    let access = |claims: Value| signed(&good, "at+jwt", &issuer.claims(&claims));
    let right = access(json!({}));
    let mut without_exp = issuer.claims(&json!({}));
    without_exp.as_object_mut().unwrap().remove("exp");
    let part = |value: &Value| BASE64.encode(value.to_string());
    let unsigned = format!(
        "{}.{}.",
        part(&json!({"alg": "none", "typ": "at+jwt", "kid": "a"})),
        part(&issuer.claims(&json!({})))
    );
    let with_the_public_key = {
        let header = Header {
            kid: Some("a".into()),
            typ: Some("at+jwt".into()),
            ..Header::new(Algorithm::HS256)
        };
        encode(
            &header,
            &issuer.claims(&json!({})),
            &EncodingKey::from_secret(&good.public_pem),
        )
        .unwrap()
    };
    let mut other_claims: Vec<&str> = right.split('.').collect();
    let admin = part(&issuer.claims(&json!({"groups": ["acme"]})));
    other_claims[1] = &admin;
    let page = json!({"aud": "page"});
    for (what, token, used) in [
        ("another audience", access(json!({"aud": "other"})), Use::Access),
        ("the page's audience", access(page.clone()), Use::Access),
        (
            "another issuer",
            access(json!({"iss": "https://evil.example"})),
            Use::Access,
        ),
        ("expired", access(json!({"exp": now - 60})), Use::Access),
        ("not yet valid", access(json!({"nbf": now + 120})), Use::Access),
        ("of the future", access(json!({"iat": now + 120})), Use::Access),
        ("too long", access(json!({"exp": now + 25 * 3600})), Use::Access),
        ("without an end", signed(&good, "at+jwt", &without_exp), Use::Access),
        ("without a subject", access(json!({"sub": ""})), Use::Access),
        (
            "an ID token as a bearer",
            signed(&good, "JWT", &issuer.claims(&page)),
            Use::Access,
        ),
        (
            "one of another type",
            signed(&good, "JWT", &issuer.claims(&json!({}))),
            Use::Access,
        ),
        (
            "forged with another key",
            signed(&forger, "at+jwt", &issuer.claims(&json!({}))),
            Use::Access,
        ),
        ("alg none", unsigned, Use::Access),
        ("signed with the public key", with_the_public_key, Use::Access),
        ("other claims", other_claims.join("."), Use::Access),
        (
            "a signature cut short",
            right[..right.len() - 4].to_owned(),
            Use::Access,
        ),
        ("no token", "a.b.c".to_owned(), Use::Access),
        ("an access token in the cookie", access(page.clone()), Use::Page),
        (
            "for another client",
            signed(&good, "JWT", &issuer.claims(&json!({"aud": ["page", "x"], "azp": "x"}))),
            Use::Page,
        ),
        (
            "for machines",
            signed(&good, "JWT", &issuer.claims(&json!({}))),
            Use::Page,
        ),
    ] {
        let problem = provider.verify(&token, used).await.expect_err(what);
        assert_eq!(problem.status, StatusCode::UNAUTHORIZED, "{what}: {problem:?}");
        let said = problem.detail.unwrap();
        assert!(!said.contains(&token) && !said.contains("ada"), "{what}: {said}");
    }
    provider.verify(&right, Use::Access).await.unwrap();
    // clocks differ by some seconds
    provider
        .verify(&access(json!({"exp": now - 10, "iat": now + 20})), Use::Access)
        .await
        .unwrap();
}

#[tokio::test]
async fn keys_of_the_provider_come_and_go() {
    let (old, new) = (pair("old"), pair("new"));
    let issuer = Issuer::start(&[&old]).await;
    let provider = issuer.provider();
    let token = |pair: &Pair| signed(pair, "at+jwt", &issuer.claims(&json!({})));
    provider.verify(&token(&old), Use::Access).await.unwrap();
    assert_eq!(
        provider.verify(&token(&new), Use::Access).await.unwrap_err().status,
        401
    );
    issuer.set_keys(&[&old, &new]);
    for pair in [&new, &old] {
        provider.verify(&token(pair), Use::Access).await.unwrap();
    }
    issuer.set_keys(&[&new]);
    assert_eq!(
        provider
            .verify(&token(&pair("third")), Use::Access)
            .await
            .unwrap_err()
            .status,
        401
    );
    assert_eq!(
        provider.verify(&token(&old), Use::Access).await.unwrap_err().status,
        401
    );
    // while the provider does not answer, what it said last counts
    *issuer.served.lock().unwrap() = json!({});
    assert_eq!(
        provider.verify(&token(&old), Use::Access).await.unwrap_err().status,
        401
    );
    provider.verify(&token(&new), Use::Access).await.unwrap();
    let fresh = issuer.provider();
    assert_eq!(fresh.verify(&token(&new), Use::Access).await.unwrap_err().status, 503);
}

#[tokio::test]
async fn a_login_brings_back_what_it_began_with() {
    let pair = pair("a");
    let issuer = Issuer::start(&[&pair]).await;
    let provider = issuer.provider();
    let attempt = Attempt::new("/releases").unwrap();
    let address = provider.login_address(&attempt).await.unwrap();
    let asked: std::collections::HashMap<_, _> = address.query_pairs().into_owned().collect();
    assert_eq!(
        (asked["tenant"].as_str(), asked["code_challenge_method"].as_str()),
        ("a", "S256")
    );
    assert_eq!(
        (asked["state"].as_str(), asked["client_id"].as_str()),
        (attempt.state.as_str(), "page")
    );
    let challenge = BASE64.encode(openssl::sha::sha256(attempt.verifier.as_bytes()));
    assert_eq!(asked["code_challenge"], challenge);
    let kept = Attempt::from_text(&attempt.to_text()).unwrap();
    assert_eq!((&kept, Attempt::from_text("x")), (&attempt, None));
    let answers = |nonce: &str| {
        let id_token = signed(&pair, "JWT", &issuer.claims(&json!({"aud": "page", "nonce": nonce})));
        let mut served = issuer.served.lock().unwrap();
        served["form"] = json!([
            "code=c%2B1",
            format!("code_verifier={}", attempt.verifier),
            "grant_type=authorization_code"
        ]);
        served["id_token"] = id_token.clone().into();
        id_token
    };
    let token = answers(&attempt.nonce);
    let (kept_token, person) = provider.redeem("c+1", &kept).await.unwrap();
    assert_eq!((kept_token, person.label.as_str()), (token, "ada@example.com (u1)"));
    let problem = provider.redeem("c+2", &kept).await.unwrap_err();
    assert!(problem.detail.unwrap().contains("invalid_grant"));
    answers("of another login");
    assert_eq!(provider.redeem("c+1", &kept).await.unwrap_err().status, 401);
}

#[test]
fn settings_that_would_let_in_the_wrong_ones_are_refused() {
    let right = json!({"issuer": "https://id.example/realm", "groups": [{"name": "sre", "role": "release"}]});
    let check = |change: Value| {
        let mut options = right.clone();
        options
            .as_object_mut()
            .unwrap()
            .extend(change.as_object().unwrap().clone());
        serde_json::from_value::<OidcOptions>(options)
            .map_err(|error| error.to_string())?
            .check()
    };
    check(json!({})).unwrap();
    check(json!({"issuer": "http://localhost:8080", "redirect_url": "https://tide.example/login/callback"})).unwrap();
    for (change, why) in [
        (json!({"issuer": "http://id.example"}), "https://"),
        (json!({"issuer": ""}), "no address"),
        (
            json!({"redirect_url": "https://tide.example/callback"}),
            "/login/callback",
        ),
        (json!({"audience": "springtide-page"}), "differ"),
        (json!({"groups": []}), "groups is empty"),
        (json!({"groups": [{"name": "sre"}]}), "either a role or scopes"),
        (json!({"groups": [{"name": "sre", "role": "root"}]}), "root"),
        (json!({"groups": [{"name": "sre", "scopes": []}]}), "nothing"),
        (json!({"groups": [{"name": "sre", "roles": []}]}), "unknown field"),
    ] {
        let error = check(change).unwrap_err();
        assert!(error.contains(why), "{why}: {error}");
    }
}

#[test]
fn a_person_is_known_by_the_subject() {
    assert!(is_same_person("Ada (u1)", "Ada L. (u1)") && is_same_person("ops", "ops"));
    assert!(!is_same_person("Ada (u1)", "Ada (u2)") && !is_same_person("ops", "ci"));
}
